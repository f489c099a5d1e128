"""A KV cache for the attention layers of a model that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.meter import summary
from tachyscope.core.plan import Plan, spell
from tachyscope.core.session import Session
from tachyscope.core.types import CustomRope, Mlp, Rope, Shape
from tachyscope.passes.all import AllPasses
from tachyscope.snapshot.format import check_tensor

P = ParamSpec("P")
Turn = Callable[[Tensor], tuple[Tensor, Tensor]]
MOST_PASSES = 1_000  # over a chunk, where their number is learned
T = TypeVar("T")


def video_rope(head_dim: int, theta: float = 10000.0) -> Rope:
    """Rotary positions over (t, y, x), with a head's channels split as Wan does."""
    side = 2 * (head_dim // 6)
    time = head_dim - 2 * side
    axes = ((time, (1.0, 0.0, 0.0)), (side, (0.0, 1.0, 0.0)), (side, (0.0, 0.0, 1.0)))
    return Rope(axes, theta)


def _inference(
    method: Callable[Concatenate[VideoCache, P], T],
) -> Callable[Concatenate[VideoCache, P], T]:
    """In inference mode whatever the host is in; its own tensors come back as ordinary ones."""

    @wraps(method)
    def call(self: VideoCache, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with torch.inference_mode():
            out = method(self, *args, **kwargs)
        # the host may change the result in place, which an inference tensor refuses
        return out.clone() if isinstance(out, Tensor) else out  # type: ignore[return-value]

    outside_graphs: Callable[Concatenate[VideoCache, P], T] = torch.compiler.disable(call)
    return outside_graphs


class _Pass(NamedTuple):
    """Where the host says that a pass stands."""

    frame: int
    frames: int
    noise: float
    past: bool


class VideoCache:
    """What a model's attention layers call instead of keeping keys and values.

        cache = VideoCache("fast", layers=30, chunk=3)
        cache.begin(frame=start, frames=f, grid=(h, w))  # once a pass of the model
        y = cache.attend(i, q, k, v)                     # in layer i

    The session behind it opens with the first tensors. A pass that begins at the end of the last
    chunk makes that chunk final: nobody has to call `commit`. A pass at the same frame goes over
    the chunk again, one at an earlier frame forgets what came from there on. Frame 0 after anything
    else, or another grid, is a new video.
    """

    def __init__(
        self,
        plan: str | Plan = "fast",
        *,
        layers: int,
        chunk: int,
        passes: int | None = None,
        latent_frames: int | None = None,
        prompt_tokens: int = 0,
        rope: Rope | Turn | None = None,
        rotated: bool = False,
    ) -> None:
        """
        chunk: the most latent frames of a pass. passes: over a chunk, the one that leaves its keys
        and values included; as many as the first chunk takes that is made, unless given.
        latent_frames: of the video, where known: a bank reserves no more. prompt_tokens: that
        cross-attention sees, where `cross` is called. rope: as the model turns queries and keys, or
        a function of positions (t, y, x) [..., 3] that gives cos and sin [..., D / 2] of pairs of
        channels (2i, 2i + 1); Wan's unless given. rotated: they come turned already.
        """
        numbers = {"layers": layers, "chunk": chunk, "passes": 1 if passes is None else passes}
        for name, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise TachyscopeError(f"`{name}` must be 1 or more, got {shown(value)}")
        if rotated and rope is not None:
            raise TachyscopeError("keys that are rotated=True are not turned: leave `rope` out")
        parsed = Plan.parse(plan) if isinstance(plan, str) else plan
        self.plan = _served(parsed, prompt_tokens, rotated, passes)
        self.layers, self.chunk, self.passes = layers, chunk, passes
        self.latent_frames, self.prompt_tokens = latent_frames, prompt_tokens
        self.rope = rope if isinstance(rope, Rope | None) else CustomRope(turn=rope)
        self.rotated = rotated
        self.session: Session | None = None
        self._saved: Mapping[str, Tensor] | None = None
        self.reset()

    def __repr__(self) -> str:
        at = f"latent frame {self._end}" if self.session else "not begun"
        return f"VideoCache({str(self.plan)!r}, layers={self.layers}, chunk={self.chunk}: {at})"

    @_inference
    def reset(self) -> None:
        """Forget everything: the next pass starts a new video."""
        self.session = None
        self._grid: tuple[int, int] | None = None
        self._now: _Pass | None = None
        self._begun = self._open = False  # the pass has tensors; the chunk is not final
        self._fed = False  # the pass came to `mlp`
        self._frame = self._end = 0  # of the chunk under way, or of the last one
        self._index = 0  # passes over it so far
        self._learned = self.passes  # passes over a chunk, once they are known

    @_inference
    def begin(
        self,
        frame: int,
        frames: int,
        grid: tuple[int, int],
        noise: float = 1.0,
        past: bool = True,
    ) -> None:
        """A pass of the model over latent frames `frame` to `frame + frames` starts.

        grid: tokens of a latent frame, rows and columns. noise: its level, 0 for frames that are
        clean. With `past` False the pass reads its own frames alone.
        """
        if frames < 1 or frames > self.chunk:
            raise TachyscopeError(
                f"a pass over {frames} latent frames, where this cache was made for at most "
                f"{self.chunk}: give VideoCache(chunk={max(frames, 1)})"
            )
        if self.plan.replay is not None and self._begun and not self._fed:
            raise TachyscopeError(
                f"replay={spell(self.plan.replay)} had no feed-forward layer in the last pass: "
                f"call cache.mlp(layer, x, fn) in each layer, or leave replay out"
            )
        again = self._open and frame == self._frame
        goes_on = frame == self._end and (self.session is not None or self._saved is not None)
        if self._saved is not None and self._grid is None:
            again, goes_on = False, True  # which frame a restored cache stands at is checked below
        elif self._grid is not None and (grid != self._grid or (frame == 0 and not again)):
            self.reset()
            again, goes_on = False, frame == 0
        elif self.session is None:
            goes_on = frame == 0
        elif frame < self._frame:
            self._rewind(frame)
            again, goes_on = False, True
        if not (again or goes_on):
            end = self._end if self.session is not None else 0  # a pass that attended to nothing
            either = f"{self._frame} or {end}" if self._open else f"{end}"
            raise TachyscopeError(
                f"a pass at latent frame {frame}, where {either} can come, or 0 for a new video"
            )
        if goes_on and self._open:
            self.commit()
        self._grid = grid
        self._now = _Pass(frame, frames, noise, past)
        self._frame, self._end, self._begun, self._fed = frame, frame + frames, False, False

    @_inference
    def commit(self) -> None:
        """Make the chunk under way final; the next pass does, unless there is none."""
        if self._open:
            assert self.session is not None
            self.session.commit()
            given = self._index == 1 and self._now is not None and not self._now.noise
            if self._learned is None and not given:
                self._learned = self._index
            self._open, self._index = False, 0

    def _rewind(self, frame: int) -> None:
        """Forget what came from this latent frame on."""
        session = self.session
        assert session is not None
        if session.memory.past != session.memory.total_entries:
            raise TachyscopeError(
                f"a pass at latent frame {frame} after {session.memory.latent_frame}, and "
                f"cache={spell(session.plan.cache)} no longer has all that was before it: begin at "
                f"{self._frame}, or at 0 for a new video, or use cache=keep_all"
            )
        self._open, self._index = False, 0
        session.memory.now, session.memory.begun = 0, set()
        layers, attention = session.present.layers, session.plan.attention
        for p in layers:
            attention.restore_order(p, session.memory.past)
        session.memory.rewind(session.memory.latent_frame - frame, frame)
        session.memory.replay.ready.clear()  # what is kept came behind this frame
        for p in layers:
            attention.build_index(p, session.memory.past)

    @_inference
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, H, S, D] over past and now; k, v [B, Hkv, S, D].

        Queries and keys are normed and not rotated, unless it was said: the cache turns them.
        """
        if self._now is not None and self._grid is not None:
            rows, columns = self._grid
            if q.shape[2] != self._now.frames * rows * columns:
                raise TachyscopeError(
                    f"{q.shape[2]} queries, where a pass over {self._now.frames} latent frames of "
                    f"{rows} x {columns} tokens has {self._now.frames * rows * columns}"
                )
        return self._session(q, k).attend(layer, q, k, v)

    @_inference
    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W] of a feed-forward layer, or less of it where the plan replays.

        Called behind `attend` in the same layer. fn.macs: its multiply-adds of one row.
        """
        if self.session is None or not self._begun:
            raise TachyscopeError("call attend before mlp in each layer of a pass")
        if x.dim() != 3 or x.shape[2] != self.session.shape.width:
            raise TachyscopeError(
                f"a feed-forward layer's input of shape {tuple(x.shape)}, where a replay keeps "
                f"rows [batch, tokens, {self.session.shape.width}]: leave replay out"
            )
        self._fed = True
        return self.session.mlp(layer, x, fn)

    @_inference
    def set_prompt(self, layer: int, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
        """One layer's keys and values [B, H, L, D] of the prompt; rows are padding from lengths on.

        Layers come in order. A prompt may be set anew in mid-video.
        """
        if self.plan.text is None:
            raise TachyscopeError(
                "this cache was made without a prompt: give VideoCache(prompt_tokens=…)"
            )
        self._session(k, k).set_prompt_layer(layer, k, v, lengths)

    @_inference
    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attention over the prompt of q [B, H, S, D]."""
        session = self._session(q, q)
        if layer >= len(session.memory.texts):
            raise TachyscopeError(f"layer {layer} has no prompt yet: call set_prompt first")
        return session.cross(layer, q)

    @property
    def has_prompt(self) -> bool:
        """Whether every layer has its keys and values of a prompt."""
        return self.session is not None and len(self.session.memory.texts) == self.layers

    @_inference
    def stats(self) -> dict[str, float]:
        """Counted work since the last call: pairs, pairs_dense and what follows from them."""
        if self.session is None:
            return {}
        self.session.count_bank()
        row = self.session.meter.take()
        return summary([row]) | {"entries": float(self.session.memory.past)}

    @_inference
    def state(self) -> dict[str, Tensor]:
        """Everything between two chunks, as tensors by name, ready for a safetensors file."""
        if self.session is None:
            raise TachyscopeError("nothing has been attended to yet: there is no state to save")
        return self.session.state(kept={"passes": torch.tensor(self._learned or 0)})

    @_inference
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, by a cache of the same plan, with the next pass."""
        self.reset()
        self._saved = dict(state)

    def _session(self, q: Tensor, k: Tensor) -> Session:
        """The session, with this pass begun."""
        if self._now is None or self._grid is None:
            raise TachyscopeError("call begin(frame=…, frames=…, grid=…) once before each pass")
        if self.session is None:
            self.session = self._opened(q, k)
        session, shape = self.session, self.session.shape
        if (q.shape[0], q.shape[1], q.shape[3]) != (shape.batch, shape.heads, shape.head_dim):
            raise TachyscopeError(
                f"queries of shape {tuple(q.shape)}, where this video has batch {shape.batch}, "
                f"{shape.heads} heads of {shape.head_dim}: reset() begins another video"
            )
        if not self._begun:
            frame, frames, noise, past = self._now
            pos = shape.positions(frame, frames, q.device)
            # frames that come clean in one pass were given: they are remembered as a clean pass
            clean = noise == 0 and self._index == 0
            passes = self._learned or self._index + 2
            step = passes - 1 if clean else min(self._index, passes - 1)
            session.begin(pos, step, passes, (noise,) * frames, past=past)
            self._begun = self._open = True
            self._index += 1
        return session

    def _opened(self, q: Tensor, k: Tensor) -> Session:
        assert self._grid is not None and self._now is not None
        shape = Shape(
            layers=self.layers, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
            width=q.shape[1] * q.shape[3], grid=self._grid, chunk=self.chunk,
            passes=self.passes or MOST_PASSES,
            text=self.prompt_tokens, batch=q.shape[0],
        )  # fmt: skip
        rope = self.rope or video_rope(q.shape[3])
        if self.rotated:
            rope = CustomRope(turn=lambda pos: _still(pos, q.shape[3]))
        session = Session(
            shape, self.plan, rope, device=q.device, dtype=q.dtype,
            latent_frames=self.latent_frames,
        )  # fmt: skip
        if self._saved is not None:

            def learn(kept: Mapping[str, Tensor]) -> None:
                if "passes" in kept:
                    check_tensor(kept, "passes", torch.tensor(0), (0, MOST_PASSES))
                    self._learned = self.passes or int(kept["passes"]) or None

            session.restore(self._saved, check=learn)
            self._saved = None
            if self._now.frame != session.memory.latent_frame:
                self.reset()
                raise TachyscopeError(
                    f"a pass at latent frame {self._frame} after a state of "
                    f"{session.memory.latent_frame}: begin there"
                )
        return session


def _still(pos: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """cos and sin of what is not turned."""
    one = torch.ones(*pos.shape[:-1], channels // 2, device=pos.device)
    return one, torch.zeros_like(one)


def _served(plan: Plan, prompt_tokens: int, rotated: bool, passes: int | None) -> Plan:
    """The plan as a model's layers can follow it; raises for what is not theirs."""
    if rotated and (plan.cache.keeps_unrotated or plan.cache.view_depends_on_pass):
        raise TachyscopeError(
            f"cache={spell(plan.cache)} turns keys again, and those that are rotated=True cannot "
            f"be: hand them over before RoPE, or use another cache"
        )
    if plan.passes not in (None, AllPasses()):
        raise TachyscopeError(
            f"passes={spell(plan.passes)} acts outside attention, where this cache cannot: "
            f"leave passes out"
        )
    if plan.replay is not None and passes is None:
        raise TachyscopeError(
            f"replay={spell(plan.replay)} keeps outputs of every pass over a chunk: give "
            f"VideoCache(passes=…) where their number is known, else leave replay out"
        )
    if not prompt_tokens:  # the host keeps its own cross-attention
        return replace(plan, text=None)
    return plan
