"""The next layer's past, decoded while this layer's linears run."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes import Past, decode_into


class DecodedAhead:
    """Memory for one layer's past in the model's dtype, which all layers of a session share.

    `start` decodes on a CUDA stream of its own, behind all that was launched before; `take` makes
    the current stream wait for it. The host never waits.
    """

    def __init__(self, room: int) -> None:
        self._room = room  # entries that the memory is made for at first
        self._memory: tuple[Tensor, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._of: object = None  # whose past it is

    def start(self, layer: object, past: Past, dtype: torch.dtype) -> None:
        """Decode a layer's past."""
        assert past.k_scale is not None and past.v_scale is not None
        count = past.k.shape[2]
        if self._stream is None:
            self._stream = torch.cuda.Stream(past.k.device)
        if self._memory is None or self._memory[0].shape[2] < count:
            self._room = max(self._room, count)
            shape = (*past.k.shape[:2], self._room, past.k.shape[3])
            k, v = (past.k_scale.new_empty(shape, dtype=dtype) for _ in range(2))
            self._memory = k, v
        # what was read from the memory before is read by now
        self._stream.wait_stream(torch.cuda.current_stream(past.k.device))
        with torch.cuda.stream(self._stream):
            decode_into(past.k, past.k_scale, self._memory[0][:, :, :count])
            decode_into(past.v, past.v_scale, self._memory[1][:, :, :count])
        self._of = layer

    def take(self, layer: object, end: int) -> Past | None:
        """A layer's past up to slot `end`, once; None where it was not decoded ahead."""
        if self._of is not layer or self._memory is None:
            return None
        self.join()
        return Past(*(x[:, :, :end] for x in self._memory))

    def join(self) -> None:
        """Let the current stream wait for what was started."""
        if self._of is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._of = None
