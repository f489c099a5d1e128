"""Frames of a world against its truth: what is right, sharp, moving and remembered."""

from __future__ import annotations

from tachyscope.measure.quality import FLAT, Frames, contrast, detail, motion, psnr
from tachyscope.models.atrium.world import OBJECTS, TURN
from tachyscope_lab.evaluation.batched_rollout import Forced, Take
from tachyscope_lab.evaluation.frame_checks import stopped_share, surfaces_right, unsaid_db
from tachyscope_lab.evaluation.intervals import Values, mean
from tachyscope_lab.evaluation.scenes import Scene, frames_a_step, new_place

HORIZONS = (24, 48, 96)
# A turned camera sees nothing of a view left six steps ago. So these frames of a turn show nothing
# that the first frame shows, which most caches keep as a sink.
FAR = range(6, TURN - 5)
EVERY = {"pose": 6, "identity": 4, "teacher": 4}  # these looks cost more than a frame's making
ENDS = 48  # made frames, first and last, whose identity is told apart
STRETCH = 160  # frames by which drift is told, where there are more
BLURRED = 0.5  # of the truth's detail: a picture with less is blurred


def judge(frames: Frames, scene: Scene, given: int) -> Values:
    """A rollout against the truth; every frame it made shows what was given before."""
    truth = scene.frames[given:]
    near = psnr(frames, truth)
    out: Values = {"psnr_truth": mean(near)}
    for low, high in zip((0, *HORIZONS), HORIZONS, strict=False):
        if len(near) >= high:
            out[f"psnr_truth_{high}"] = mean(near[low:high])
    anew = new_place(scene, given)
    out["new_place_db"] = mean(near[anew])
    far = [i - 1 for i in far_frames(scene.pace)]
    out["revisit_db"] = mean(near[far])
    out["revisit_unsaid_db"] = unsaid_db(frames[far], scene, [given + i for i in far])
    sharp = detail(frames) / scene.once("detail", lambda: detail(scene.frames))[given:]
    out["sharpness"] = float(sharp.mean())
    out["blurred"] = float((sharp < BLURRED).mean())
    true_motion = scene.once("motion", lambda: motion(scene.frames))[given - 1 :]
    moved = motion(frames, scene.frames[given - 1]), true_motion
    out["frozen"] = stopped_share(*moved)
    out["flat"] = float((contrast(frames) < FLAT).mean())
    step = EVERY["identity"]
    at = range(step - 1, len(frames), step)
    right = surfaces_right(frames[at], scene, [given + i for i in at])

    def same(start: int, stop: int) -> float:
        return mean(x for i, row in zip(at, right, strict=True) if start <= i < stop for x in row)

    out["identity"] = same(0, len(frames))
    strange = set(anew)
    things = [row[OBJECTS:] for i, row in zip(at, right, strict=True) if i in strange]
    out["objects_new_place"] = mean(x for row in things for x in row.tolist())
    if len(frames) > 2 * ENDS:
        out["identity_first"] = same(0, ENDS)
        out["identity_last"] = same(len(frames) - ENDS, len(frames))
    for start in range(0, len(frames), STRETCH) if len(frames) > STRETCH else ():
        stop = min(start + STRETCH, len(frames))
        out[f"stretch_{stop}_db"] = mean(near[start:stop])
        out[f"identity_stretch_{stop}"] = same(start, stop)
        out[f"blurred_{stop}"] = float((sharp[start:stop] < BLURRED).mean())
        out[f"frozen_{stop}"] = stopped_share(*(x[start:stop] for x in moved))
    return out


def judge_forced(forced: Forced, scene: Scene, given: int) -> Values:
    """The next frame given the true past; repeating the last one; and what none can beat."""
    at = list(forced.index)
    truth, anew = scene.frames[at], new_place(scene, given)
    near = psnr(forced.frames, truth)
    return {
        "teacher_forced_db": mean(near),
        "teacher_forced_new_place_db": mean(
            x for x, i in zip(near, at, strict=True) if i - given in anew
        ),
        "repeat_db": mean(psnr(scene.frames[[i - 1 for i in at]], truth)),
        "autoencoder_db": mean(psnr(forced.shown, truth)),
    }


def revisit_own(take: Take, pace: float = 1.0) -> float:
    """PSNR of the second turn to the model's own first: what it made up, does it remember?"""
    last, turn = len(take.frames), TURN * frames_a_step(pace)
    at = [turn + i - 1 for i in far_frames(pace) if turn + i <= last]
    return mean(psnr(take.frames[at], take.frames[[i - turn for i in at]]))


def far_frames(pace: float) -> range:
    """Frames of a turn, from 1 on, that show nothing that its first shows."""
    times = frames_a_step(pace)
    return range(FAR[0] * times, FAR[-1] * times + 1)
