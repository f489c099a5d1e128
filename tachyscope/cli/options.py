"""Options of verbs that make a video: model, prompt, actions, device, plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tachyscope.cli.verb import PathText, Verb, option, read_word, required
from tachyscope.core.errors import TachyscopeError, shown, warn
from tachyscope.core.limits import check, check_prompt, number, whole

# torch is loaded when a verb runs: help must not wait for it
if TYPE_CHECKING:
    from tachyscope.measure.quality import Frames
    from tachyscope.memory.promise import Promise
    from tachyscope.models.atrium.visit import Visit
    from tachyscope.models.base import VideoModel

# The default plan of every verb: bounded, so that no video is too long for it.
PLAN = "fast"
MODEL = "A name that `tachyscope list models` shows, or a model of your own: my.py:MyWorld."
PLAN_HELP = "A name that `tachyscope list plans` shows, or one with changes: 'fast replay=none'."
WEIGHTS = (
    "The checkpoint, where the model needs one; 'download' fetches a published model's files, "
    "'random' makes them up to time it. Also lora=FILE, lora_alpha=N, decoder=FILE "
    "(taew2_1, lighttaew2_1 or lightvaew2_1), decoder_check=1, decoder_bands=N (Wan's VAE in less "
    "memory) and precision=fp8 (also fp8_linears and fp8_attention, Wan-type models alone); may be "
    "given several times."
)
DEVICE = "cpu, cuda or cuda:N; models run in float32 on a CPU and in bfloat16 on a GPU."
GIVEN = "`world`'s given frames"
BESIDE_WEIGHTS = (
    "lora", "lora_alpha", "decoder", "decoder_check", "decoder_bands", "precision",
)  # fmt: skip
# in which dtype a model runs on a kind of device
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


class Prompts(NamedTuple):
    """A video's prompt: text, or a file of an embedded one, and its changes at later frames."""

    text: str
    file: str | None
    changes: list[tuple[int, str]]


class Room(NamedTuple):
    """A room of the model's world that training never used, and how many true frames to give."""

    number: int
    given: int


@dataclass(frozen=True, kw_only=True)
class VideoVerb(Verb):
    """A verb that makes videos of one model."""

    model: str = required(MODEL, positional=True)
    prompt: tuple[str, ...] = option(
        (),
        "What the video shows, in words, or @FILE of a prompt embedded before; a second one, "
        "'24: a blue room', is the prompt from that new frame on.",
    )
    actions: str = option("", "One action a frame, in models that take them: 'w*20 a*24'.")
    world: str | None = option(
        None,
        "Start in this unseen room of the model's world, with its prompt, first frame and truth; "
        "7:257 gives 257 true frames, and the first 256 actions lead through them.",
    )
    frames: int = option(48, "Pixel frames to make.")
    size: str | None = option(
        None, "HEIGHTxWIDTH in pixels, in models that make more than one size."
    )
    weights: tuple[PathText, ...] = option((), WEIGHTS)
    device: str = option("cpu", DEVICE)

    def rollout_options(self, prompt_changes: bool = False) -> dict[str, Any]:
        """The arguments of a rollout, checked before a model is loaded.

        prompt_changes: whether the verb takes changes of prompt.
        """
        check("frames", self.frames)
        read_room(self.world)
        prompts = read_prompts(self.prompt)
        from tachyscope.core.request import parse_size

        size = parse_size(self.size)
        if prompts.changes and not prompt_changes:
            raise TachyscopeError(
                f"a prompt changes in generate alone, got {' and '.join(self.prompt)}: give one "
                f"`prompt`"
            )
        return {"frames": self.frames, "prompt": prompts.text, "size": size}

    def load(self, dtype: str | None = None) -> VideoModel:
        """The model on its device, in the device's default dtype unless one is given."""
        from tachyscope.models.registry import with_prompt

        model = load_model(self.model, self.weights, self.device, dtype)
        _, file, changes = read_prompts(self.prompt)
        return with_prompt(model, file, [name for _, name in changes]) if file else model

    def visit(self, model: VideoModel) -> tuple[Visit | None, dict[str, Any]]:
        """The walk through the room that --world names, or None; and the rollout's actions.

        With the walk come its prompt, and the true frames that are given with their actions.
        """
        from tachyscope.core.arguments import parse_actions
        from tachyscope.models.atrium.visit import Visit
        from tachyscope.models.registry import MODELS

        room, entry = read_room(self.world), MODELS.get(self.model)
        if room is None:
            shown = getattr(self, "first", None) or getattr(self, "video", None)
            if model.camera and shown is None:
                warn(f"without a room the first picture of {self.model} is a blur: pass --world N")
            if model.conditions and getattr(self, "first", None) is None:
                warn(f"{self.model} is trained to begin with a picture: `generate` takes --first")
            return None, {"actions": self.actions}
        if entry is None or not entry.world:
            known = ", ".join(name for name, entry in MODELS.items() if entry.world)
            raise TachyscopeError(
                f"model {self.model!r} has no world whose truth is known, got --world "
                f"{self.world}: use {known}"
            )
        if self.prompt:
            raise TachyscopeError("a world brings its own prompt: leave --prompt or --world out")
        numbers = parse_actions(self.actions, model.actions, self.frames + room.given - 1)
        visit = Visit(room.number, numbers, pace=entry.pace, tempo=entry.tempo)
        letters = [model.actions[number] for number in (0, *numbers)]
        return visit, {
            "prompt": visit.prompt,
            "first": visit.frames(0, room.given),
            "first_actions": " ".join(letters[: room.given]),
            "actions": " ".join(letters[room.given :]),
            **({"start": visit.view} if model.camera else {}),
        }

    def about(self) -> str:
        """A sentence on the model, for a report."""
        from tachyscope.models.registry import MODELS

        entry = MODELS.get(self.model)
        random = "random" in self.weights or (entry is not None and entry.random)
        more = "Its weights are random, so its pictures say nothing of quality." if random else ""
        return " ".join(filter(None, ["" if entry is None else f"Model: {entry.about}.", more]))


def load_model(
    name: str, weights: tuple[str, ...] = (), device: str = "cpu", dtype: str | None = None
) -> VideoModel:
    """Load a model with the words of --weights; in its device's default dtype unless given."""
    from tachyscope.models.registry import load

    check_download(name, weights, device)
    path, beside = read_weights(weights)
    if "precision" in beside and device == "cpu":
        warn("a CPU simulates float8 in float32: the pictures are those of a GPU, no time is saved")
    return load(name, path, device=device, dtype=dtype or dtype_of(device), **beside)


def check_download(name: str, weights: Sequence[str], device: str) -> None:
    """Raise before gigabytes are fetched for a device that the model is too large for."""
    from tachyscope.models.registry import MODELS

    if "download" in weights and device == "cpu" and name in MODELS and MODELS[name].gpu:
        raise TachyscopeError(
            f"{name} is too large for a CPU, and --weights download would fetch it for one: add "
            f"--device cuda, or give the files' own paths"
        )


def promise_memory(
    model: VideoModel, name: str, plans: Sequence[str], with_what: str = "", **video: Any
) -> tuple[Promise | None, str]:
    """The predicted peak memory of runs by these plans, one after the other, and a line with it.

    Raises if the machine has less; not for a server (`with_what`), which checks each session.
    (None, "") if a model's memory is unknown.
    """
    from tachyscope.memory.promise import Promise, promise

    each = [promise(model, plan, **video) for plan in plans]
    known = [one for one in each if one is not None]
    if not known:
        return None, ""
    promised = Promise(*(max(sizes) for sizes in zip(*known, strict=True)))
    if not with_what:
        promised.check(model)
    return promised, f"{name} by {' or '.join(plans)}{with_what}: predicted peak {promised}"


def dtype_of(device: str) -> str:
    """The default dtype of models on a device."""
    return DTYPES.get(device.split(":")[0], DTYPES["cpu"])


def read_prompts(words: tuple[str, ...]) -> Prompts:
    """Prompts: `a red room` or `@FILE`, and after `24: ` the prompt from that frame on.

    `0: 2001: a space odyssey` is a first prompt that itself begins with a number.
    """
    first: list[str] = []
    changes: list[tuple[int, str]] = []
    for word in words:
        match = re.fullmatch(r"\s*(\d{1,9})\s*:(.*)", word, re.DOTALL)
        text = word if match is None else match[2].strip()
        if match is None or int(match[1]) == 0:
            first.append(text)
        else:
            changes.append((int(match[1]), text))
    if len(first) > 1:
        raise TachyscopeError(
            f"a video begins with one prompt, got {shown(first[0])} and {shown(first[1])}: write "
            f"'24: {first[1]}' for one that comes later"
        )
    if changes and not first:
        raise TachyscopeError(
            f"a prompt that begins with a number and a colon comes later, got {shown(words[0])} "
            f"alone: give the first prompt too, or write '0: {words[0]}'"
        )
    begins = first[0] if first else ""
    files = [text.startswith("@") for text in (begins, *(text for _, text in changes))]
    if not any(files):
        return Prompts(check_prompt(begins), None, changes)
    if not all(files):
        raise TachyscopeError(
            f"prompts are all words or all files, got {' and '.join(map(shown, words))}: embed the "
            f"others too"
        )
    return Prompts("", begins[1:], [(frame, text[1:]) for frame, text in changes])


def read_video_word(text: str) -> tuple[str, float | None]:
    """The file or camera and the strength, if given, in `clip.mp4:0.4`."""
    path, colon, level = text.rpartition(":")
    if not (colon and path and re.fullmatch(r"[0-9.]+", level)):
        return text, None
    return path, check("strength", number(level, "strength"), "the strength of `video`")


def read_room(text: str | None) -> Room | None:
    """The room in `7` or `7:257`, and the number of its frames that are given."""
    if text is None:
        return None
    number, _, given = text.partition(":")
    return Room(
        check("world", whole(number, "`world`")),
        check("given", whole(given, GIVEN), GIVEN) if given else 1,
    )


def read_weights(words: tuple[str, ...]) -> tuple[str | None, dict[str, Any]]:
    """The checkpoint among the words of --weights, and the other keywords of `load`."""
    path: str | None = None
    beside: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in BESIDE_WEIGHTS:
            if path is not None:
                raise TachyscopeError(
                    f"one checkpoint is loaded, got {path} and {word}: leave one out, or write "
                    f"lora={word}"
                )
            path = word
            continue
        if key in beside:
            raise TachyscopeError(f"--weights {key} is given twice: leave one out")
        if key == "lora_alpha":
            beside[key] = number(value, key)
        elif key == "decoder_check":
            beside[key] = whole(value, key) != 0
        elif key == "decoder_bands":
            beside[key] = whole(value, key)
        elif key == "precision":
            beside[key] = value
        else:
            beside[key] = read_word(Path, value, key)
    return path, beside


def check_plan(text: str, model: str) -> str:
    """The plan's text, after a check that needs no model."""
    from tachyscope.core.plan import check_text

    check_text(text, kind_of(model))
    return text


def kind_of(model: str) -> str:
    """The kind of a model's named plans; chunks for an unknown name."""
    from tachyscope.models.registry import MODELS

    return MODELS[model].kind if model in MODELS else "chunks"


def fit_first(frames: Frames, size: tuple[int, int]) -> Frames:
    """Given frames at the video's size: cropped in the middle and scaled if needed."""
    from tachyscope.io.video import resize_frames

    given: tuple[int, ...] = frames.shape[1:3]
    if given == size:
        return frames
    sizes = ["{}x{}".format(*pixels) for pixels in (given, size)]
    warn(f"the frames of --first are {sizes[0]}: cut in the middle and scaled to {sizes[1]}")
    return resize_frames(frames, *size)
