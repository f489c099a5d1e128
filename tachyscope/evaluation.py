"""How good a world model is on Atrium, and what each plan costs it: truth, memory, recall.

`python -m tachyscope.evaluation atrium` needs neither cyclopts, rich nor av.
"""

from __future__ import annotations

import math
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tachyscope.adapters import Adapter
from tachyscope.attention import AttentionPolicy
from tachyscope.attention.ann import Ann
from tachyscope.bench import Parser
from tachyscope.cache import merge as merging
from tachyscope.errors import TachyscopeError
from tachyscope.kernels.merge import fold
from tachyscope.machine import machine
from tachyscope.meter import Meter, summary
from tachyscope.models import load
from tachyscope.plan import NAMES, Plan
from tachyscope.quality import FLAT, Frames, contrast, detail, horizon, motion, psnr
from tachyscope.results import Document, check_json, document, emit
from tachyscope.rollout import open_session, parse_plan, refill, rollout
from tachyscope.session import Session
from tachyscope.types import Layer, Moment, Shape
from tachyscope.worlds import atrium
from tachyscope.worlds.atrium import FLOOR, OBJECTS, STRIDE, TURN, Rooms

# Training draws from seeds up to about 10^8, and its own scores from 2^31. torch's CPU generator
# keeps 32 bits of a seed, so these are the ones left: from here to 2^32.
UNSEEN = 3_000_000_000
WORLDS_A_SEED = 1_000

GIVEN = "." + "q" * TURN  # all of the room is shown before anything is made
# The same turn again, from the same place, where a frame can be copied; then, from places where
# the walker never stood, what was seen before must be drawn anew.
WALK = "q" * 24 + "wwaa" + "e" * 20 + "dddd" + "q" * 20 + "ssss" + "e" * 20
QUICK_WALK = "q" * 18 + "wwaa" + "e" * 4
HORIZONS = (24, 48, 96)
# A turned camera sees nothing of a view left six steps ago. So these frames of a turn show nothing
# that the first frame shows, which most caches keep as a sink.
FAR = range(6, TURN - 5)
OWN_WALK = "q" * (TURN + 12)  # from one given frame: the second turn must repeat the first
WINDOW = "cache=window:budget=13f"  # shorter than the turn
EVERY = {"pose": 6, "identity": 4, "teacher": 4}  # these looks cost more than a frame's making
PROBED = (12, 24, 48, 96)  # made frames at which recall is sampled
COLUMNS = 1024  # slots whose attention is read off at once
TRUSTED = 24  # made frames over which closeness to dense is told; the floor says if rightly
FLOOR_WORLDS = 2  # a dense run in float64 is slow
MOVED = 0.9 * STRIDE  # from every place of the given frames; a stride, rounded, may be less
# Where the search for a pose begins, off the truth: x, y, heading. From the truth itself it would
# find the truth too easily.
ASTRAY = torch.tensor([0.031, -0.023, 0.37])
STOPPED = 0.25  # of the truth's motion: a picture that moves less has stopped
REGION, THING = 0.04, 0.01  # shares of the picture from which a surface, an object is judged
SMALL = 48  # pixels of the picture that surfaces are read from

Values = dict[str, float]
Watch = Callable[[int], None]


@dataclass(frozen=True)
class World:
    """A room, where the walk begins in it, and what the prompt says."""

    number: int
    rooms: Rooms  # of one row
    start: Tensor  # [1, 3]
    prompt: str


def make_world(seed: int, number: int, motion: float = 1.0) -> World:
    """World `number` of an evaluation's seed: the same whatever other worlds are asked for."""
    if not (0 <= seed < 1_000 and 0 <= number < WORLDS_A_SEED):
        raise TachyscopeError(
            f"seed and world must be from 0 to 999, got seed {seed} and world {number}: "
            f"others may have been trained on"
        )
    generator = Generator().manual_seed(UNSEEN + WORLDS_A_SEED * seed + number)
    rooms = atrium.make_rooms(1, generator, motion)
    start = atrium.make_starts(1, generator)
    prompt = atrium.descriptions(rooms, 0)[int(atrium.facing(start[0]))]
    return World(number, rooms, start, prompt)


@dataclass(frozen=True)
class Scene:
    """A walk through a world: its actions, and the truth at every frame."""

    world: World
    actions: str  # letters, one a frame; the first is "stay"
    pose: Tensor  # [T, 3]
    frames: Frames  # [T, 128, 128, 3]

    @property
    def time(self) -> Tensor:
        return torch.arange(len(self.pose))

    def rooms(self, count: int) -> Rooms:
        return self.world.rooms.rows(torch.zeros(count, dtype=torch.long))


def make_scene(world: World, actions: str) -> Scene:
    """The truth of a walk, rendered."""
    pose = atrium.walk(world.start, atrium.letters(actions)[None])
    scene = torch.zeros(1, len(actions), dtype=torch.long)
    clips = atrium.Clips(
        world.rooms, scene, scene, pose, torch.arange(len(actions)).expand_as(scene)
    )
    return Scene(world, actions, pose[0], _levels(atrium.film(clips)[0]))


def _levels(pictures: Tensor) -> Frames:
    """Pictures [F, 3, S, S] in 0..1 as frames."""
    levels = (255 * pictures.clamp(0, 1)).round().to(torch.uint8)
    # laid out as frames are: an encoder rounds otherwise for another layout of the same numbers
    return levels.permute(0, 2, 3, 1).contiguous().numpy()


def _pictures(frames: Frames) -> Tensor:
    """Frames as pictures [F, 3, S, S] in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255


# --- what a frame shows -------------------------------------------------------------------------


def surfaces_right(frames: Frames, scene: Scene, index: Sequence[int]) -> Tensor:
    """Whether each surface is what it should be: [F, 10], NaN where too little of it is in view.

    frames are those of numbers `index` of the scene. A surface (walls, floor, ceiling, objects) is
    right when its pixels, the light removed, have the named colours that the truth's have, by at
    least 60 % overlap of their shares, and when the pattern that fits it best is its own.
    """
    out = torch.full((len(index), OBJECTS + 4), math.nan)
    for row, (picture, i) in enumerate(zip(_pictures(frames), index, strict=True)):
        out[row] = _read_surfaces(picture, scene.world.rooms, scene.pose[i : i + 1], float(i))
    return out


def _read_surfaces(picture: Tensor, rooms: Rooms, pose: Tensor, now: float) -> Tensor:
    time = torch.tensor([now])
    _, light, seen = atrium.cast(rooms, pose, time, SMALL, 1)
    surface, bright = seen[0, :, 0], light[0, :, 0].clamp(min=0.2)[:, None]
    truth = atrium.render(rooms, pose, time, SMALL)[0]
    small = F.interpolate(picture[None], size=(SMALL, SMALL), mode="area")[0]
    palette = torch.tensor(list(atrium.PALETTE.values()))
    bare, bare_truth = (x.flatten(1).T / bright for x in (small, truth))  # [P, 3]
    names, names_truth = (torch.cdist(x, palette).argmin(-1) for x in (bare, bare_truth))
    out = torch.full((OBJECTS + 4,), math.nan)
    masks = None
    for i in range(OBJECTS + 4):
        mine = surface == i
        if mine.float().mean() < (THING if i >= OBJECTS else REGION):
            continue
        shares = [
            x[mine].bincount(minlength=len(palette)) / mine.sum() for x in (names, names_truth)
        ]
        right = bool(torch.minimum(*shares).sum() >= 0.6)
        if right and i <= FLOOR and rooms.kind[0, i] > 0:
            if masks is None:
                masks = _pattern_masks(rooms, pose)
            first, second = palette[rooms.colour[0, i]]
            way = second - first
            mixed = ((bare[mine] - first) @ way / (way @ way)).clamp(0, 1)
            right = _pattern_right(mixed, masks[:, :, mine], int(rooms.kind[0, i]))
        out[i] = float(right)
    return out


def _pattern_masks(rooms: Rooms, pose: Tensor, phases: int = 8) -> Tensor:
    """Where each kind at each phase shows its second colour: [kinds, phases, P]."""
    kinds = len(atrium.KINDS)
    count = kinds * phases
    many = rooms.rows(torch.zeros(count, dtype=torch.long))
    kind = torch.arange(kinds).repeat_interleave(phases)[:, None].expand(count, 6)
    phase = (torch.arange(phases) / phases).repeat(kinds)[:, None].expand(count, 6).clone()
    phase[:, FLOOR:] = 0
    dark, bright = atrium.COLOURS.index("black"), atrium.COLOURS.index("white")
    colour = torch.tensor([dark, bright]).expand(count, 6, 2)
    many = replace(many, kind=kind, phase=phase, colour=colour, thing=torch.zeros_like(many.thing))
    shown = atrium.cast(many, pose.expand(count, 3), torch.zeros(count), SMALL, 1)[0]
    masks: Tensor = (shown[0, :, :, 0] > 0.5).float().unflatten(0, (kinds, phases))
    return masks


def _pattern_right(mixed: Tensor, masks: Tensor, kind: int) -> bool:
    """Whether no other kind of pattern, at its best phase, fits clearly better than the true one.

    mixed [P] is how much of the second colour each pixel has, masks [kinds, phases, P].
    """
    errors = (masks - mixed).abs().mean(-1).amin(-1)  # [kinds]
    errors[0] = torch.minimum(errors[0], (1 - mixed).abs().mean())  # plain, in either colour
    return bool(errors[kind] <= errors.min() + 0.05)


def identity(frames: Frames, scene: Scene, index: Sequence[int]) -> float:
    """The share of surfaces in view, over all frames, that are right."""
    return _mean(surfaces_right(frames, scene, index).flatten().tolist())


def pose_errors(frames: Frames, scene: Scene, index: Sequence[int]) -> tuple[float, float]:
    """How far frames seem to be from their true poses: in sides of the room, and in degrees."""
    places, headings = [], []
    for picture, i in zip(_pictures(frames), index, strict=True):
        true = scene.pose[i]
        near, now = true + ASTRAY, torch.tensor([float(i)])
        found, _ = atrium.locate(picture, scene.world.rooms, near, now)
        places.append(float((found[:2] - true[:2]).norm()))
        headings.append(abs(float(found[2] - true[2])) * 360 / TURN)
    return _mean(places), _mean(headings)


def stopped(frames: Frames, truth: Frames, before: Frames) -> float:
    """The share of frames that hardly move from the last though the truth does.

    before [H, W, 3] is the frame ahead of the first, in both.
    """
    ours, theirs = motion(frames, before), motion(truth, before)
    asked = theirs > 1.0
    return float((ours[asked] < STOPPED * theirs[asked]).mean()) if asked.any() else math.nan


def unsaid_db(frames: Frames, scene: Scene, index: Sequence[int]) -> float:
    """Mean PSNR over what the prompt leaves out: unnamed walls, unnamed objects, the ceiling."""
    rooms = scene.world.rooms
    unsaid = torch.cat([~rooms.said[0], torch.tensor([False, True]), ~rooms.told[0]])
    size = frames.shape[1]
    found = []
    for frame, i in zip(frames, index, strict=True):
        seen = atrium.see(rooms, scene.pose[i : i + 1], torch.tensor([float(i)]), size)[0]
        mask = unsaid[seen].numpy()
        if mask.mean() >= 0.1:
            error = np.square(frame[mask].astype(np.float64) - scene.frames[i][mask]).mean()
            found.append(min(100.0, 10 * math.log10(255**2 / max(error, 1e-6))))
    return _mean(found)


def prompt_right(frames: Frames, scene: Scene, index: Sequence[int]) -> float:
    """Of the walls that the prompt names and the first frame hides, how many come out as named.

    Judged at the frame, of numbers `index`, that first shows four fifths of the most seen of it.
    """
    rooms = scene.world.rooms
    at = torch.tensor(list(index))
    views = atrium.in_view(scene.rooms(len(at)), scene.pose[at], at.float())
    hidden = atrium.in_view(rooms, scene.pose[:1], torch.zeros(1))[0] < 0.05
    found = []
    for wall in range(4):
        if not (rooms.said[0, wall] and hidden[wall]):
            continue
        row = int((views[:, wall] >= 0.8 * views[:, wall].max()).int().argmax())
        picture, i = _pictures(frames[row : row + 1]), index[row]
        time = torch.tensor([float(i)])
        shares = atrium.colour_shares(picture, rooms, scene.pose[i : i + 1], time, wall)[0]
        plain = int(rooms.kind[0, wall]) == 0
        named = shares[rooms.colour[0, wall, : 1 if plain else 2]]
        found.append(float(named.sum() >= 0.6 and named.min() >= 0.1))
    return _mean(found)


# --- recall -------------------------------------------------------------------------------------


def recall_of(method: Tensor, dense: Tensor, slot: Tensor) -> Tensor:
    """Σ min(dense mass, the method's mass) of each query, over groups for merged entries.

    method [..., S, past + now], dense [..., S, seen + now], slot [..., seen]: in which slot of the
    method's past each entry of the dense one went, -1 for gone.
    """
    seen = slot.shape[-1]
    past = method.shape[-1] - (dense.shape[-1] - seen)
    groups = torch.zeros(*method.shape[:-1], past + 1, dtype=dense.dtype, device=dense.device)
    index = torch.where(slot < 0, past, slot).unsqueeze(-2).expand(*dense.shape[:-1], seen)
    groups.scatter_add_(-1, index, dense[..., :seen])
    both = torch.minimum(groups[..., :past], method[..., :past]).sum(-1)
    return both + torch.minimum(dense[..., seen:], method[..., past:]).sum(-1)


def read_mass(policy: AttentionPolicy, q: Tensor, layer: Layer, at: Moment) -> Tensor:
    """The attention [B, H, S, end] that a policy really pays: its answer to one-hot values."""
    width = COLUMNS
    if isinstance(policy, Ann) and policy.top_p is not None:
        width = q.shape[3]  # its ragged form writes into the queries' shape
    parts = []
    for lo in range(0, at.end, width):
        hot = torch.zeros(layer.k.shape[2], width, dtype=layer.v.dtype, device=layer.v.device)
        count = min(width, at.end - lo)
        hot[lo : lo + count, :count] = torch.eye(count, dtype=hot.dtype, device=hot.device)
        values = hot.expand(*layer.k.shape[:2], -1, -1)
        parts.append(policy.attend(q, replace(layer, v=values), at, Meter(q.device))[..., :count])
    return torch.cat(parts, -1)


class Probed(Session):
    """A session that also holds what `keep_all` would, and compares attention with it.

    Its outputs are those of a plain session; `recalls` gathers, by chunk, the recall of every
    query of the first and the clean pass over the chunks in `wanted`, as [B, H, S] a layer.
    """

    def __init__(self, shape: Shape, *args: Any, wanted: Collection[int] = (), **kwargs: Any):
        self.wanted = frozenset(wanted)
        super().__init__(shape, *args, **kwargs)

    def reset(self) -> None:
        super().reset()
        groups = (self.shape.rows, self.plan.cache.groups(self.shape), 0)
        # by layer: keys and log-weights as they were committed, and the slot each went to
        self.shadow: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        self.slots = [torch.zeros(groups, dtype=torch.int64, device=self.device)] * len(self.layers)
        self.recalls: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        at = self._moment
        assert at is not None and self._angles is not None
        ends = at.step in (0, at.steps - 1)
        if self.chunk in self.wanted and ends and self.past and not self._prefilling:
            turned = self.rope.turn(q, *self._angles)
            self.recalls.setdefault(self.chunk, []).append(self._recall(turned, at.at(layer)))
        return out

    def _recall(self, q: Tensor, at: Moment) -> Tensor:
        here, heads = self.layers[at.layer], q.shape[1]
        now = slice(at.past, at.end)
        parts = [*self.shadow[at.layer], (here.k[:, :, now], here.logw[:, :, now])]
        keys, logw = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        keys, logw = (
            x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] > 1 else x
            for x in (keys, logw)
        )
        scores = q.double() @ keys.double().mT / math.sqrt(q.shape[3])
        dense = (scores + logw.double().unsqueeze(2)).softmax(-1)
        slots = self.slots[at.layer]
        slots = slots.repeat_interleave(heads // slots.shape[1], 1)
        return recall_of(read_mass(self.plan.attention, q, here, at).double(), dense, slots)

    def commit(self, n: int | None = None) -> None:
        n = self.now if n is None else n
        past, total = self.past, self.past + n
        before = []
        for i, layer in enumerate(self.layers):
            new = slice(past, total)
            # committed weights are those of one group a head where heads keep their own entries
            logw = layer.logw[:, :, new].clone()
            self.shadow[i].append((layer.k[:, :, new].clone(), logw))
            before.append(self._labels(layer, total))
        folds: list[tuple[Tensor, Tensor]] = []

        def note(v: Tensor, logw: Tensor, source: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
            folds.append((source, root))
            return fold(v, logw, source, root)

        # folding is the one moment at which entries' groups are known
        with mock.patch.object(merging, "fold", note):
            super().commit(n)
        for i, layer in enumerate(self.layers):
            self._follow(i, layer, before[i], folds[i] if folds else None, past, n)

    def _labels(self, layer: Layer, count: int) -> Tensor:
        """One number an entry, from its position; another for each empty slot."""
        t, y, x = layer.pos[:, :, :count].long().unbind(-1)
        label = t * self.shape.places + y * self.shape.grid[1] + x
        slot = torch.arange(count, device=label.device) + 2**50
        return torch.where(layer.logw[:, :, :count] == -math.inf, slot, label)

    def _follow(
        self,
        i: int,
        layer: Layer,
        before: Tensor,
        folded: tuple[Tensor, Tensor] | None,
        past: int,
        n: int,
    ) -> None:
        """Bring `slots` up to date: whose group each entry joined, and where that stands now."""
        total = before.shape[2]
        protected = self.prompt + (getattr(self.plan.cache, "sink", 0) or 0) * self.shape.places
        first = min(protected, past)
        slot = torch.arange(total, device=before.device).expand_as(before)
        group = slot.clone()
        if folded is not None:
            source, root = folded
            group.scatter_(2, source + first, root + first)
        # an entry stands where one of its group stood: find it by its position
        order = before[:, :, first:].contiguous().sort(-1)
        after = self._labels(layer, self.past)
        found = torch.searchsorted(order.values, after[:, :, first:].contiguous())
        member = order.indices.gather(2, found.clamp(max=total - first - 1)) + first
        # the sink never moves, though its positions may
        member = torch.cat([slot[:, :, :first], member], 2)[:, :, : self.past]
        stands = torch.full((*before.shape[:2], total + 1), -1, device=before.device)
        live = layer.logw[:, :, : self.past] > -math.inf
        target = torch.where(live, group.gather(2, member), total)
        stands.scatter_(2, target, torch.arange(self.past, device=before.device).expand_as(target))
        stands[:, :, total] = -1
        old = self.slots[i]
        fresh = slot[:, :, past : past + n].expand(*old.shape[:2], n)
        held = torch.cat([old, fresh], 2)
        now = stands.gather(2, group.gather(2, held.clamp(min=0)))
        self.slots[i] = torch.where(held < 0, -1, now)


# --- a world ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What an evaluation measures; small enough to be sent to another process."""

    plans: tuple[str, ...]
    seed: int = 0
    frames: int = 48
    quick: bool = False
    recall: bool = True
    world: bool = True  # the model's own measures
    own: bool = False  # every plan's revisit of what the model itself made up

    @property
    def walk(self) -> str:
        return QUICK_WALK if self.quick else WALK[: self.frames]


@dataclass(frozen=True)
class Take:
    """A rollout that went on from true frames: what was made, and the meter's sums."""

    frames: Frames
    sums: Values
    session: Session


def take(
    model: Adapter, plan: str | Plan, scene: Scene, given: int, probed: Collection[int] = ()
) -> Take:
    """Play a scene's actions after its first `given` true frames, which the cache remembers.

    probed: numbers of made frames, from 1 on, at which recall is sampled.
    """
    made = len(scene.actions) - given
    wanted = [given + i - 1 for i in probed]
    words = " ".join(scene.actions)
    session: Session = open_session(
        model, plan, prompt=scene.world.prompt, frames=made, seed=scene.world.number,
        size=scene.frames.shape[1:3], first=scene.frames[:given],
        first_actions=words[: 2 * given - 1],
        make=partial(Probed, wanted=wanted) if probed else Session,
    )  # fmt: skip
    chunks = list(rollout(model, frames=made, actions=words[2 * given :], session=session))
    frames = np.concatenate([chunk.frames for chunk in chunks])
    return Take(frames, summary([chunk.stats for chunk in chunks]), session)


def teacher_forced(model: Adapter, scene: Scene, given: int, made: Sequence[int]) -> Values:
    """The next frame given the true past: PSNR at frames `made`, and that of repeating the last.

    The autoencoder's own PSNR comes along, as what no prediction can beat.
    """
    shape = model.shape(scene.frames.shape[1:3])
    last = max(made)
    session = Session(
        shape, parse_plan(model, "dense"), model.rope(shape), frames=last + 1,
        seed=scene.world.number, device=model.device, dtype=model.dtype,
    )  # fmt: skip
    moves = [model.actions.index(letter) for letter in scene.actions]
    with torch.inference_mode():
        latents = model.latents(scene.frames[: last + 1])
        words = " ".join(scene.actions[:given])
        refill(model, session, latents[:, :, :given], scene.world.prompt, words)
        made_frames = []
        for i in range(given, last + 1):
            if i in made:
                made_frames.append(model.decode(session, model.sample(session, [moves[i]])))
            # the true frame takes the place of the made one in now
            model.clean(session, latents[:, :, i : i + 1], [moves[i]])
            session.commit()
        shown = np.concatenate([model.decode(session, latents[:, :, i : i + 1]) for i in made])
    at = list(made)
    truth, anew = scene.frames[at], new_place(scene, given)
    near = psnr(np.concatenate(made_frames), truth)
    return {
        "teacher_forced_db": _mean(near),
        "teacher_forced_new_place_db": _mean(
            x for x, i in zip(near, at, strict=True) if i - given in anew
        ),
        "repeat_db": _mean(psnr(scene.frames[[i - 1 for i in at]], truth)),
        "autoencoder_db": _mean(psnr(shown, truth)),
    }


def judge(found: Take, scene: Scene, given: int) -> Values:
    """A rollout against the truth; every frame it made shows what was given before."""
    frames, truth = found.frames, scene.frames[given:]
    near = psnr(frames, truth)
    out: Values = {"psnr_truth": _mean(near)}
    for low, high in zip((0, *HORIZONS), HORIZONS, strict=False):
        if len(near) >= high:
            out[f"psnr_truth_{high}"] = _mean(near[low:high])
    anew = new_place(scene, given)
    out["new_place_db"] = _mean(near[anew])
    far = [i - 1 for i in FAR]
    out["revisit_db"] = _mean(near[far])
    out["revisit_unsaid_db"] = unsaid_db(frames[far], scene, [given + i for i in far])
    out["sharpness"] = float((detail(frames) / detail(truth)).mean())
    out["frozen"] = stopped(frames, truth, scene.frames[given - 1])
    out["flat"] = float((contrast(frames) < FLAT).mean())
    step = EVERY["identity"]
    at = list(range(step - 1, len(frames), step))
    out["identity"] = identity(frames[at], scene, [given + i for i in at])
    return out


def new_place(scene: Scene, given: int) -> list[int]:
    """The made frames, counted from 0, that stand a stride or more from every given one."""
    far = torch.cdist(scene.pose[given:, :2], scene.pose[:given, :2]).amin(1)
    return [i for i, way in enumerate(far.tolist()) if way >= MOVED]


def counted(found: Take) -> Values:
    """What a rollout cost, by the meter: all of it for the frames that were made."""
    sums, session = found.sums, found.session
    keys = ("density", "cache_mb", "rows_computed", "rows_replayed", "share_all")
    out = {key: sums[key] for key in keys if key in sums}
    out["gmacs_frame"] = sums["macs"] / sums["frames"] / 1e9
    out["entries_share"] = session.past / session.seen
    if isinstance(session, Probed):
        by_chunk = {i: torch.cat([x.flatten() for x in r]) for i, r in session.recalls.items()}
        every = torch.cat(list(by_chunk.values()))
        out["recall"] = float(every.mean())
        out["recall_p5"] = float(every.quantile(0.05))
        out["recall_end"] = float(by_chunk[max(by_chunk)].mean())
    return out


def revisit_own(found: Take) -> float:
    """PSNR of the second turn to the model's own first: what it made up, does it remember?"""
    last = len(found.frames)
    at = [TURN + i - 1 for i in FAR if TURN + i <= last]
    return _mean(psnr(found.frames[at], found.frames[[i - TURN for i in at]]))


def measure(model: Adapter, asked: Asked, number: int, twin: Adapter | None = None) -> Document:
    """All that is measured on one world: `world`, the model's own values, and one row a plan."""
    given = len(GIVEN)
    world = make_world(asked.seed, number)
    scene = make_scene(world, GIVEN + asked.walk)
    probed = [i for i in PROBED if i <= asked.frames] if asked.recall else []
    rows: list[Values] = []
    own: Values = {}
    dense = None
    if asked.world or "dense" in asked.plans:
        dense = take(model, "dense", scene, given)
        judged = judge(dense, scene, given)
    if dense is not None and twin is not None and number < FLOOR_WORLDS:
        near = psnr(take(twin, "dense", scene, given).frames, dense.frames)
        found = horizon(near)
        parted = asked.frames if found is None else found
        own |= {"horizon": float(parted), "floor_db": _mean(near[:TRUSTED])}
    if dense is not None and asked.world:
        own |= _own_measures(model, asked, scene, dense, judged)
    for plan in asked.plans:
        if plan == "dense" and dense is not None:
            row = judged | counted(dense) | {"work_dense": 1.0}
            if asked.recall:
                row |= {"recall": 1.0, "recall_p5": 1.0, "recall_end": 1.0}
        else:
            made = take(model, plan, scene, given, probed)
            row = judge(made, scene, given) | counted(made)
            if dense is not None:
                near = psnr(made.frames[:TRUSTED], dense.frames[:TRUSTED])
                row["psnr_dense"] = _mean(near)
                row["work_dense"] = made.sums["macs"] / dense.sums["macs"]
        if asked.own:
            row["revisit_own_db"] = _own_turn(model, plan, asked, number)[0]
        rows.append(row)
    return {"world": own, "rows": rows}


def _own_turn(model: Adapter, plan: str, asked: Asked, number: int) -> tuple[float, float]:
    """From one given frame in a still world: revisit of what was made up, prompt followed."""
    # nothing moves on its own, so that the second turn should equal the first
    still = make_world(asked.seed, number, motion=0.0)
    scene = make_scene(still, "." + OWN_WALK[: TURN + 7 if asked.quick else None])
    made = take(model, plan, scene, 1)
    first = range(1, TURN + 1)
    return revisit_own(made), prompt_right(made.frames[:TURN], scene, first)


def _own_measures(
    model: Adapter, asked: Asked, scene: Scene, dense: Take, judged: Values
) -> Values:
    """The world model's own measures, beside those of its dense rollout."""
    given, number = len(GIVEN), scene.world.number
    less = 2 if asked.quick else 1
    out = dict(judged)
    step = EVERY["pose"] * less
    looked = list(range(step - 1, len(dense.frames), step))
    index = [given + i for i in looked]
    found = pose_errors(dense.frames[looked], scene, index)
    out["pose_error"], out["heading_error"] = found
    last = given + min(48, len(asked.walk))
    at = range(given, last, EVERY["teacher"] * less)
    out |= teacher_forced(model, scene, given, at)
    # what the search for a pose finds on true frames is its own error
    out["pose_floor"], out["heading_floor"] = pose_errors(scene.frames[at[:4]], scene, at[:4])
    short = make_scene(scene.world, scene.actions[: given + FAR[-1]])
    window = take(model, WINDOW, short, given)
    far = [i - 1 for i in FAR]
    out["revisit_window_db"] = _mean(psnr(window.frames[far], short.frames[given:][far]))
    out["revisit_own_db"], out["prompt_right"] = _own_turn(model, "dense", asked, number)
    if not asked.quick:
        out["revisit_own_window_db"] = _own_turn(model, WINDOW, asked, number)[0]
    return out


# --- many worlds --------------------------------------------------------------------------------

# Student's t at 97.5 %, by degrees of freedom from 1
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
           2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
           2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean of what is a number, and its 95 % interval by Student's t; no interval of one value."""
    x = np.array([value for value in values if math.isfinite(value)])
    if len(x) == 0:
        return math.nan, math.nan, math.nan
    mean = float(x.mean())
    if len(x) == 1:
        return mean, math.nan, math.nan
    freedom = len(x) - 1
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.5 / freedom
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, mean - half, mean + half


def versus(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """By how much row a exceeds row b in `key`, world by world: mean and 95 % interval."""
    pairs = zip(a["by_world"][key], b["by_world"][key], strict=True)
    # a JSON file has null for a value that is no number
    return interval(x - y for x, y in pairs if x is not None and y is not None)


def _mean(values: Iterable[float]) -> float:
    x = [float(value) for value in values if math.isfinite(value)]
    return sum(x) / len(x) if x else math.nan


def _combined(found: Sequence[Values]) -> Document:
    """Means and intervals of the worlds' values, and the values themselves."""
    keys = list(dict.fromkeys(key for values in found for key in values))
    out: Document = {}
    by_world: dict[str, list[float]] = {}
    for key in keys:
        by_world[key] = [values.get(key, math.nan) for values in found]
        out[key], out[f"{key}_low"], out[f"{key}_high"] = interval(by_world[key])
    return out | {"by_world": by_world}


def evaluate(
    model: Adapter,
    plans: Sequence[str] = ("dense", "balanced", "fast"),
    *,
    worlds: int = 16,
    seed: int = 0,
    frames: int = 48,
    quick: bool = False,
    recall: bool = True,
    world: bool = True,
    own: bool = False,
    twin: Adapter | None = None,
    command: str = "",
    watch: Watch | None = None,
    found: Iterable[Document] | None = None,
) -> Document:
    """Play plans through unseen worlds; a results document with 95 % intervals over worlds.

    Every rollout is shown one full turn of the room, then makes `frames` frames (96 at most) of a
    walk that sees all of it again. world: also measure the model itself, as `world`. own: also
    each plan's memory of what the model makes up. recall: sample each plan's attention recall.
    twin: the same model in another dtype, for the floor: until which frame two dense runs agree.
    quick: 26 frames and no recall. watch: is told how many worlds are done.
    found: `measure`'s results, by world, where others made them.
    """
    asked = ask(model, plans, seed, frames, quick, recall, world, own)
    if worlds < 1:
        raise TachyscopeError(f"worlds must be 1 or more, got {worlds}")
    for number in (0, worlds - 1):
        make_world(seed, number)  # raises where there are not so many
    if found is None:
        found = (measure(model, asked, number, twin) for number in range(worlds))
    results: list[Document] = []
    for result in found:
        results.append(result)
        if watch is not None:
            watch(len(results))
    rows = []
    for i, plan in enumerate(asked.plans):
        row: Document = {
            "name": plan if plan in NAMES else "plan",
            "plan": str(parse_plan(model, plan)),
            "asked": plan,
            "model": model.name,
            "frames": asked.frames,
            "worlds": worlds,
        }
        rows.append(row | _combined([result["rows"][i] for result in results]))
    more: Document = {"given": GIVEN, "walk": asked.walk, "seed": seed}
    if world:
        whole = _combined([result["world"] for result in results])
        parted = [x for x in whole["by_world"].get("horizon", []) if math.isfinite(x)]
        if parted:
            # the floor holds where it holds in every world
            whole["horizon"] = min(parted)
        more["world"] = whole
    return document("atrium", rows, command, **more)


def ask(
    model: Adapter, plans: Sequence[str], seed: int, frames: int, quick: bool, recall: bool,
    world: bool, own: bool,
) -> Asked:  # fmt: skip
    """The evaluation asked for; raises where it cannot be made."""
    if model.actions != atrium.ACTIONS or model.kind != "chunks":
        raise TachyscopeError(
            f"{model.name} is no world model of Atrium, whose actions are {atrium.ACTIONS!r}: "
            f"evaluate atrium-world"
        )
    if not TURN <= frames <= len(WALK):
        raise TachyscopeError(f"frames must be from {TURN} to {len(WALK)}, got {frames}")
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    if quick:
        frames, recall = len(QUICK_WALK), False
    return Asked(tuple(plans), seed, frames, quick, recall, world, own)


def grid(part: str, budget: str = "12f") -> list[str]:
    """Plans of a trade-off table, beside dense.

    budget: window and merge at equal budgets. matching: on what merge compares, whom it keeps,
    by head or for all. ann: how much of the past is read. replay: how many MLP rows are not run.
    """
    plans = {
        "budget": [
            f"cache={cache}:budget={frames}f"
            for frames in (7, 9, 13, 21, 33)
            for cache in ("window", "merge")
        ],
        "matching": [f"cache=window:budget={budget}"]
        + [
            f"cache=merge:budget={budget},match={match},keep={keep},heads={heads}"
            for match in ("rotated", "unrotated", "key_value")
            for keep in ("partner", "newest")
            for heads in ("shared", "each")
        ],
        "ann": [f"attention=ann:read={read}" for read in (0.1, 0.2, 0.3, 0.5)]
        + [f"cache=merge:budget=21f attention=ann:read={read}" for read in (0.2, 0.3, 0.5)],
        "replay": [f"replay={name}:share={share}" for share in (0.25, 0.5, 0.75)
                   for name in ("attentive", "random")],
    }  # fmt: skip
    if part not in plans:
        raise TachyscopeError(f"no table {part!r}; there are: {', '.join(plans)}")
    return ["dense", *plans[part]]


COLUMNS_SHOWN = {
    "revisit_db": ("revisit", 1.0, "5.1f"),
    "new_place_db": ("anew", 1.0, "5.1f"),
    "psnr_truth_24": ("to 24", 1.0, "5.1f"),
    "psnr_truth_48": ("to 48", 1.0, "5.1f"),
    "psnr_truth_96": ("to 96", 1.0, "5.1f"),
    "revisit_own_db": ("own", 1.0, "5.1f"),
    "identity": ("same", 100.0, "4.0f"),
    "density": ("dens.", 100.0, "4.0f"),
    "cache_mb": ("MB", 1.0, "5.1f"),
    "work_dense": ("work", 100.0, "4.0f"),
    "recall": ("recall", 100.0, "5.1f"),
}


def lines(found: Document) -> list[str]:
    """An evaluation as a reader wants it: the model's measures, then plans beside dense."""
    out = []
    for key, value in found.get("world", {}).items():
        if key == "by_world" or key.endswith(("_low", "_high")):
            continue
        low, high = found["world"].get(f"{key}_low"), found["world"].get(f"{key}_high")
        out.append(f"{key:24} {value:8.3f}  ({low:.3f} to {high:.3f})")
    rows = found["rows"]
    shown = [key for key in COLUMNS_SHOWN if any(key in row for row in rows)]
    width = max(len(row["asked"]) for row in rows)
    out.append(f"{'plan':{width}}  " + "  ".join(f"{COLUMNS_SHOWN[key][0]:>8}" for key in shown))
    for row in rows:
        cells = []
        for key in shown:
            _, scale, form = COLUMNS_SHOWN[key]
            cells.append(f"{scale * row.get(key, math.nan):{form}}".rjust(8))
        out.append(f"{row['asked']:{width}}  " + "  ".join(cells))
    count, made = rows[0]["worlds"], rows[0]["frames"]
    out.append(
        f"{count} unseen worlds, {made} frames after one full turn; dB to the truth (anew: from "
        f"new places; own: to the model's first showing); same, dens., work, recall in %"
    )
    return out


# --- the command --------------------------------------------------------------------------------

_ready: dict[str, Any] = {}  # a process's models


def _prepare(
    name: str, weights: str | None, device: str, floor: str | None, threads: int | None
) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    _ready["model"] = load(name, weights, device=device)
    _ready["twin"] = None if floor is None else load(name, weights, device=device, dtype=floor)


def _work(task: tuple[Asked, int]) -> Document:
    return measure(_ready["model"], *task, _ready["twin"])


def evaluate_named(
    name: str = "atrium-world",
    plans: Sequence[str] = ("dense", "balanced", "fast"),
    *,
    weights: str | None = None,
    device: str = "cpu",
    floor: str | None = None,
    worlds: int = 16,
    jobs: int | None = None,
    command: str = "",
    watch: Watch | None = None,
    **options: Any,
) -> Document:
    """`evaluate` for a model by name, worlds shared out to as many processes as there are cores.

    floor: the dtype of the dense run that dense is compared with, for the horizon.
    """
    _prepare(name, weights, device, floor, None)
    model = _ready["model"]
    defaults = {
        "seed": 0,
        "frames": 48,
        "quick": False,
        "recall": True,
        "world": True,
        "own": False,
    }
    asked = ask(model, plans, **(defaults | options))
    tasks = [(asked, number) for number in range(worlds)]
    common: dict[str, Any] = {"worlds": worlds, "command": command, "watch": watch, **options}
    jobs = min(jobs or _cores(), worlds) if device == "cpu" else 1
    if jobs <= 1:
        return evaluate(model, plans, found=map(_work, tasks), **common)
    # a process a core: two threads of one small model wait for each other more than they work
    fresh = multiprocessing.get_context("spawn")
    spec = (name, weights, device, floor, max(1, _cores() // jobs))
    with ProcessPoolExecutor(jobs, fresh, _prepare, spec) as pool:
        return evaluate(model, plans, found=pool.map(_work, tasks), **common)


def _cores() -> int:
    cores = machine()["cores"]
    assert isinstance(cores, int)
    return cores


def main(argv: Sequence[str] | None = None) -> int:
    """The verb `eval` without the command line's packages."""
    words = sys.argv[1:] if argv is None else argv
    prog = "python -m tachyscope.evaluation"
    parser = Parser(prog=prog, description="Measure a world model and plans on unseen worlds.")
    parser.add_argument("what", choices=["atrium"])
    parser.add_argument("--plan", action="append", help="may be given several times")
    parser.add_argument("--grid", help="plans of a table: budget, matching, ann, replay")
    parser.add_argument("--budget", default="12f", help="of the table matching")
    parser.add_argument("--worlds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-recall", action="store_true")
    parser.add_argument("--no-world", action="store_true", help="plans alone")
    parser.add_argument("--own", action="store_true", help="plans' memory of what is made up")
    parser.add_argument("--floor", help="dtype of the dense run to compare dense with: float64")
    parser.add_argument("--model", default="atrium-world")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, help="processes; as many as cores")
    parser.add_argument("--json", help="a file, or - for the last line of stdout")
    try:
        args = parser.parse_args(words)
        check_json(args.json)
        plans = [*(grid(args.grid, args.budget) if args.grid else []), *(args.plan or [])]
        worlds = args.worlds or (4 if args.quick else 16)

        def watch(done: int) -> None:
            print(f"{done} of {worlds} worlds", file=sys.stderr, flush=True)

        found = evaluate_named(
            args.model, plans or ["dense", "balanced", "fast"], weights=args.weights,
            device=args.device, floor=args.floor, worlds=worlds, jobs=args.jobs,
            command=f"{prog} {shlex.join(words)}", watch=watch, seed=args.seed,
            frames=args.frames, quick=args.quick, recall=not args.no_recall,
            world=not args.no_world, own=args.own,
        )  # fmt: skip
        print("\n".join(lines(found)))
        emit(found, args.json)
    except TachyscopeError as error:
        print(f"tachyscope: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
