"""A KV cache for the attention layers of any chunk-causal video model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.meter import summary
from tachyscope.core.plan import Plan, spell
from tachyscope.core.session import Session
from tachyscope.core.types import CustomRope, Mlp, Rope, Shape
from tachyscope.integrations.forward_pass import ForwardPass
from tachyscope.integrations.inference import in_inference_mode
from tachyscope.integrations.rope import check_turn, no_rotation, video_rope
from tachyscope.passes.all import AllPasses
from tachyscope.snapshot.format import check_tensor

Turn = Callable[[Tensor], tuple[Tensor, Tensor]]
MOST_PASSES = 1_000  # of a chunk, while their number is not known


class VideoCache:
    """The KV cache that a model's own attention layers call.

        cache = VideoCache("fast", layers=30, chunk=3)
        cache.begin(frame=start, frames=f, grid=(h, w))  # once before each forward pass
        y = cache.attend(i, q, k, v)                     # in layer i

    Sizes, dtype and device come from the first tensors. A pass at the end of the last chunk makes
    that chunk final, so that no `commit` is needed. A pass at the same frame computes the chunk
    again; one at an earlier frame drops everything from there on; frame 0 starts a new video.
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
        layers: how many call `attend`. chunk: the most latent frames of a pass. passes: of a chunk,
        with the clean one that leaves its keys and values; learned from the first chunk if not
        given. latent_frames: of the whole video, if known; a bank allocates for no more.
        prompt_tokens: the most tokens of a prompt, if `cross` is called. rope: how queries and keys
        are rotated, or a function of positions (t, y, x) [..., 3] that returns cos and sin
        [..., D / 2] of channel pairs (2i, 2i + 1); Wan's if not given. rotated: queries and keys
        arrive rotated.
        """
        least = {"layers": 1, "chunk": 1, "passes": 1, "latent_frames": 1, "prompt_tokens": 0}
        given = (layers, chunk, passes, latent_frames, prompt_tokens)
        for (name, low), value in zip(least.items(), given, strict=True):
            unknown = value is None and name in ("passes", "latent_frames")
            if not unknown and (not isinstance(value, int) or value < low):
                raise TachyscopeError(f"`{name}` must be {low} or more, got {shown(value)}")
        if rotated and rope is not None:
            raise TachyscopeError("rotated=True keys are not rotated again: leave `rope` out")
        parsed = Plan.parse(plan) if isinstance(plan, str) else plan
        self.plan = _served(parsed, prompt_tokens, rotated, passes)
        self.layers, self.chunk, self.passes = layers, chunk, passes
        self.latent_frames, self.prompt_tokens = latent_frames, prompt_tokens
        self.rope = rope if isinstance(rope, Rope | None) else CustomRope(turn=rope)
        self.rotated = rotated
        self.reset()

    def __repr__(self) -> str:
        at = f"latent frame {self._last.end}" if self._last else "not begun"
        return f"VideoCache({str(self.plan)!r}, layers={self.layers}, chunk={self.chunk}: {at})"

    @in_inference_mode
    def reset(self) -> None:
        """Forget everything: the next pass starts a new video."""
        self.session: Session | None = None
        self._saved: Mapping[str, Tensor] | None = None  # by `restore`, until the next tensors
        self._now: ForwardPass | None = None  # as `begin` was given it
        self._last: ForwardPass | None = None  # the newest pass with tensors
        self._final = True  # the last chunk is, and another pass over it would rewind
        self._seen: set[int] = set()  # layers that attended in the present pass
        self._fed = False  # the present pass called `mlp`
        self._index = 0  # passes over the present chunk so far
        self._learned = self.passes  # passes of a chunk, once they are known

    @in_inference_mode
    def begin(
        self,
        frame: int,
        frames: int,
        grid: tuple[int, int],
        noise: float = 1.0,
        past: bool = True,
    ) -> None:
        """A forward pass over latent frames `frame` to `frame + frames` starts.

        grid: rows and columns of a latent frame's tokens. noise: the frames' noise level, 0 for
        clean ones. With `past` False the pass reads its own frames alone.
        """
        given = ForwardPass.of(frame, frames, grid, noise, past)
        if given.frames > self.chunk:
            raise TachyscopeError(
                f"a pass over {frames} latent frames, and this cache was made for at most "
                f"{self.chunk}: give VideoCache(chunk={frames})"
            )
        if self.plan.replay is not None and self._seen and not self._fed:
            raise TachyscopeError(
                f"replay={spell(self.plan.replay)} had no feed-forward layer in the last pass: "
                f"call cache.mlp(layer, x, fn) in each layer, or leave replay out"
            )
        last = self._last
        if last is None:
            if given.frame and self._saved is None:  # a saved state says itself where it goes on
                raise TachyscopeError(
                    f"a video starts at latent frame 0, got a first pass at {frame}"
                )
        elif given.frame == last.frame and given.grid == last.grid and not self._final:
            pass  # another pass over the chunk
        elif given.frame == 0:
            self.reset()
        elif given.grid != last.grid:
            raise TachyscopeError(
                f"a pass with a grid of {given.grid[0]} x {given.grid[1]} tokens in a video of "
                f"{last.grid[0]} x {last.grid[1]}: begin at frame 0 for a new video"
            )
        elif given.frame == last.end:
            self.commit()
        elif given.frame <= last.frame:
            self._rewind(given.frame)
        else:
            either = f"{last.end}" if self._final else f"{last.frame} or {last.end}"
            raise TachyscopeError(
                f"a pass at latent frame {frame}, where {either} can come, or 0 for a new video"
            )
        self._now, self._fed = given, False
        self._seen = set()

    @in_inference_mode
    def commit(self) -> None:
        """Make the present chunk final, as the next chunk's first pass does."""
        if self._final:
            return
        assert self.session is not None and self._last is not None
        if missing := set(range(self.layers)) - self._seen:
            raise TachyscopeError(
                f"layer {min(missing)} did not attend in the last pass over latent frames "
                f"{self._last.frame} to {self._last.end}: call attend in each of the "
                f"{self.layers} layers of VideoCache(layers=…)"
            )
        self.session.commit()
        # frames that are given take one clean pass, which says nothing about those that are made
        if self._learned is None and (self._index > 1 or self._last.noise):
            self._learned = self._index
        self._final, self._index = True, 0

    def _rewind(self, frame: int) -> None:
        """Drop everything from this latent frame on."""
        session, last = self.session, self._last
        assert session is not None and last is not None
        if session.memory.past != session.memory.total_entries:
            raise TachyscopeError(
                f"a pass at latent frame {frame} after {session.memory.latent_frame}, and "
                f"cache={spell(session.plan.cache)} no longer has all that was before it: begin at "
                f"{last.end if self._final else last.frame}, or at 0 for a new video, or use "
                f"cache=keep_all"
            )
        self._final, self._index = True, 0
        session.memory.now, session.memory.begun = 0, set()
        layers, attention = session.present.layers, session.plan.attention
        for p in layers:
            attention.restore_order(p, session.memory.past)
        session.memory.rewind(session.memory.latent_frame - frame, frame)
        session.memory.replay.ready.clear()  # outputs of frames that are dropped
        for p in layers:
            attention.build_index(p, session.memory.past)

    @in_inference_mode
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, H, S, D] over the past and this pass; k, v [B, Hkv, S, D].

        Queries and keys are normed and, without rotated=True, not rotated yet.
        """
        if not 0 <= layer < self.layers:
            raise TachyscopeError(
                f"layer {layer} of a cache of {self.layers} layers: give VideoCache(layers=…)"
            )
        fits = q.dim() == 4 and k.shape == v.shape and k.shape[2:] == q.shape[2:]
        if not fits or k.shape[0] != q.shape[0] or q.shape[1] % k.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise TachyscopeError(
                f"queries, keys and values of shapes {shapes}: give [batch, heads, tokens, "
                f"channels], keys and values alike"
            )
        now = self._now
        if now is not None and q.shape[2] != now.tokens:
            raise TachyscopeError(
                f"{q.shape[2]} queries, where a pass over {now.frames} latent frames of "
                f"{now.grid[0]} x {now.grid[1]} tokens has {now.tokens}"
            )
        session = self._session(q, k)
        self._seen.add(layer)
        return session.attend(layer, q, k, v)

    @in_inference_mode
    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for the input x [B, S, W] of a feed-forward layer, part of it replayed by the plan.

        Call it after `attend` of the same layer. fn.macs: its multiply-adds per row.
        """
        if self.session is None or not self._seen:
            raise TachyscopeError("call attend before mlp in each layer of a pass")
        if x.dim() != 3 or x.shape[2] != self.session.shape.width:
            raise TachyscopeError(
                f"a feed-forward layer's input of shape {tuple(x.shape)}, where a replay keeps "
                f"rows [batch, tokens, {self.session.shape.width}]: leave replay out"
            )
        self._fed = True
        return self.session.mlp(layer, x, fn)

    @in_inference_mode
    def set_prompt(self, layer: int, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
        """One layer's keys and values [B, H, L, D] of the prompt; rows are padding from lengths on.

        Call it for the layers in order. A prompt may change in mid-video.
        """
        if self.plan.text is None:
            raise TachyscopeError(
                "this cache was made without a prompt: give VideoCache(prompt_tokens=…)"
            )
        if k.dim() != 4 or k.shape != v.shape or k.shape[2] > self.prompt_tokens:
            raise TachyscopeError(
                f"a prompt's keys and values of shapes {tuple(k.shape)} and {tuple(v.shape)}: give "
                f"[batch, heads, tokens, channels], of at most {self.prompt_tokens} tokens"
            )
        if len(lengths) != k.shape[0] or not all(0 <= n <= k.shape[2] for n in lengths):
            raise TachyscopeError(
                f"a prompt's lengths {list(lengths)!s:.60} for keys and values of shape "
                f"{tuple(k.shape)}: give one from 0 to {k.shape[2]} for each of the batch"
            )
        session = self._session(k, k)
        if not 0 <= layer <= min(len(session.memory.texts), self.layers - 1):
            raise TachyscopeError(
                f"layer {layer} gets a prompt after {len(session.memory.texts)} of {self.layers} "
                f"layers: call set_prompt for the layers in order"
            )
        session.set_prompt_layer(layer, k, v, lengths)

    @in_inference_mode
    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Attention over the prompt of q [B, H, S, D]."""
        session = self._session(q, q)
        if not 0 <= layer < len(session.memory.texts):
            raise TachyscopeError(f"layer {layer} has no prompt yet: call set_prompt first")
        return session.cross(layer, q)

    @property
    def has_prompt(self) -> bool:
        """Whether every layer has its keys and values of a prompt."""
        return self.session is not None and len(self.session.memory.texts) == self.layers

    @in_inference_mode
    def stats(self) -> dict[str, float]:
        """Counted work since the last call: pairs, pairs_dense and what follows from them."""
        if self.session is None:
            return {}
        self.session.count_bank()
        row = self.session.meter.take()
        return summary([row]) | {"entries": float(self.session.memory.past)}

    @in_inference_mode
    def state(self) -> dict[str, Tensor]:
        """Everything between two chunks, as tensors by name, ready for a safetensors file."""
        if self.session is None:
            raise TachyscopeError("no layer has attended yet: there is no state to save")
        return self.session.state(kept={"passes": torch.tensor(self._learned or 0)})

    @in_inference_mode
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken, with the same plan, from the next pass on."""
        self.reset()
        self._saved = dict(state)

    def _session(self, q: Tensor, k: Tensor) -> Session:
        """The session, in the present pass."""
        if self._now is None:
            raise TachyscopeError("call begin(frame=…, frames=…, grid=…) once before each pass")
        if self.session is None:
            self.session = self._opened(q, k, self._now)
            self._saved = None
        session, shape = self.session, self.session.shape
        if (q.shape[0], q.shape[1], q.shape[3]) != (shape.batch, shape.heads, shape.head_dim):
            raise TachyscopeError(
                f"queries of shape {tuple(q.shape)}, where this video has batch {shape.batch}, "
                f"{shape.heads} heads of {shape.head_dim}: reset() begins another video"
            )
        if q.dtype != session.dtype or q.device != session.device:
            raise TachyscopeError(
                f"queries in {q.dtype} on {q.device}, where this video began in {session.dtype} on "
                f"{session.device}: keep to one dtype and device"
            )
        if self._last is not self._now:
            frame, frames, _, noise, past = self._now
            pos = shape.positions(frame, frames, q.device)
            # clean frames in a chunk's first pass are given ones: it is the pass that is remembered
            clean = noise == 0 and self._index == 0
            passes = self._learned or self._index + 2
            step = passes - 1 if clean else min(self._index, passes - 1)
            session.begin(pos, step, passes, (noise,) * frames, past=past)
            self._last, self._final = self._now, False
            self._index += 1
        return session

    def _opened(self, q: Tensor, k: Tensor, now: ForwardPass) -> Session:
        shape = Shape(
            layers=self.layers, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
            width=q.shape[1] * q.shape[3], grid=now.grid, chunk=self.chunk,
            passes=self.passes or MOST_PASSES,
            text=self.prompt_tokens, batch=q.shape[0],
        )  # fmt: skip
        rope = self.rope or video_rope(q.shape[3])
        if self.rotated:
            rope = CustomRope(turn=lambda pos: no_rotation(pos, q.shape[3]))
        elif isinstance(rope, CustomRope):
            check_turn(rope, shape)
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
            at = session.memory.latent_frame
            if now.frame != at:
                raise TachyscopeError(
                    f"a pass at latent frame {now.frame} after a state of {at}: begin there"
                )
        return session


def _served(plan: Plan, prompt_tokens: int, rotated: bool, passes: int | None) -> Plan:
    """The part of a plan that attention layers can act on; raises for the rest."""
    if rotated and (plan.cache.keeps_unrotated or plan.cache.view_depends_on_pass):
        raise TachyscopeError(
            f"cache={spell(plan.cache)} rotates keys again, which rotated=True excludes: pass keys "
            f"before RoPE, or use another cache"
        )
    if plan.passes not in (None, AllPasses()):
        raise TachyscopeError(
            f"passes={spell(plan.passes)} acts outside attention, where this cache cannot: "
            f"leave passes out"
        )
    if plan.replay is not None and passes is None:
        raise TachyscopeError(
            f"replay={spell(plan.replay)} keeps the outputs of each pass over a chunk: give "
            f"VideoCache(passes=…), or leave replay out"
        )
    if not prompt_tokens:  # the host keeps its own cross-attention
        return replace(plan, text=None)
    return plan
