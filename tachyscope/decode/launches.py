"""A step's operations as kernels, launched one by one; `cpu.Operations` lists the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from tachyscope.kernels.decode_attention import Step, decode_attention
from tachyscope.kernels.decode_mlp import Error, Kept, MlpWeights, decode_mlp
from tachyscope.kernels.gemv import Norm, gemv
from tachyscope.kernels.sample_code import sample_code
from tachyscope.kernels.token_gate import decide_by_input

if TYPE_CHECKING:
    from tachyscope.decode.layer import Layers


class Launches:
    """Launch each operation at once."""

    gemv = staticmethod(gemv)
    decide = staticmethod(decide_by_input)
    sample = staticmethod(sample_code)
    clear = staticmethod(Tensor.zero_)
    add = staticmethod(Tensor.add_)

    def attend(self, layers: Layers, step: Step) -> None:
        decode_attention(layers.attended, layers.qkv, step, layers.scratch, layers.tokens)

    def mlp(
        self, layers: Layers, mlp: MlpWeights, kept: Kept | Error | None, barrier: Tensor
    ) -> None:
        decode_mlp(layers.x, mlp, kept, layers.inner, barrier, layers.tokens, layers.normed)

    def norm(self, out: Tensor, x: Tensor, norm: Norm) -> None:
        out.copy_(F.rms_norm(x, (x.shape[1],), norm.weight, norm.eps))

    def raise_numbers(self, numbers: Tensor) -> None:
        numbers.add_(1)
