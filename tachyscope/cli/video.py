"""The options of verbs that make a video: what to make, on what, by which plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tachyscope.bounds import check, check_prompt
from tachyscope.cli.verb import PathText, Verb, option, required
from tachyscope.errors import TachyscopeError, shown

# torch is loaded when a verb runs: help must not wait for it
if TYPE_CHECKING:
    from tachyscope.models.base import VideoModel
    from tachyscope.worlds.visit import Visit


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Verb):
    """A plan and its changes, an option for every kind of policy."""

    plan: str = option(
        "dense", "A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'."
    )
    cache: str | None = option(None, "What to remember, a change of the plan: merge:budget=21f")
    store: str | None = option(None, "How to store it, a change of the plan: native, int8 or fp8")
    attention: str | None = option(
        None, "What to read of the video, a change of the plan: ann:read=0.2"
    )
    text: str | None = option(None, "What to read of the prompt, a change of the plan: pads")
    passes: str | None = option(
        None, "Which passes to run, a change of the plan: teacache:threshold=0.15"
    )
    replay: str | None = option(
        None, "What to compute again, a change of the plan: attentive:share=0.5"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(Verb):
    """What is made, of which model and on what; by which plan is the verb's own."""

    model: str = required("A name that `tachyscope models` lists.", positional=True)
    prompt: str = option("", "What the video shows.")
    prompt_file: tuple[str, ...] = option(
        (),
        "The prompt embedded before, in Wan-type models; and 'FRAME: FILE', another from a frame "
        "on.",
    )
    actions: str = option("", "One action a frame, in models that take them: 'w*20 a*24'.")
    world: int | None = option(
        None,
        "Start in this unseen room of the model's world, with its prompt, first frame and truth; "
        "`tachyscope eval` numbers its rooms alike.",
    )
    given: int = option(
        1,
        "True frames of the world that the video goes on from; actions, one less, lead through "
        "them.",
    )
    pace: float | None = option(
        None,
        "In models that are told where their camera stands, the part of a step that a frame takes: "
        "1 is 15 degrees of a turn, 0.1 one and a half.",
    )
    frames: int = option(48, "Pixel frames to make.")
    seed: int = option(
        0, "Same seed, same video, but for a last bit where the device or its threads differ."
    )
    size: str | None = option(
        None, "HEIGHTxWIDTH in pixels, in models that make more than one size."
    )
    weights: PathText | None = option(
        None,
        "The checkpoint, where the model's name stands for one; 'download' to fetch a published "
        "model's files, 'random' to time it.",
    )
    decoder: PathText | None = option(
        None,
        "A tiny decoder's file, taew2_1 or lighttaew2_1, to decode a Wan-type checkpoint's "
        "latents.",
    )
    decoder_check: bool = option(
        False, "Decode every chunk by Wan's VAE too, and print the PSNR between the two."
    )
    lora: PathText | None = option(None, "A LoRA to merge into a Wan-type checkpoint.")
    lora_alpha: float | None = option(
        None, "The LoRA's alpha, where its file has none: updates are scaled by alpha / rank."
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option("float32", "float32, float64 or bfloat16.")
    quiet: bool = option(False, "No progress and no tables: files, --json and faults alone.")

    def rollout_options(self, prompt_changes: bool = False) -> dict[str, Any]:
        """What a rollout takes, checked before a model is loaded.

        prompt_changes: whether the verb takes changes of prompt.
        """
        check("frames", self.frames)
        check("given", self.given)
        if self.given > 1 and self.world is None:
            raise TachyscopeError(
                f"--given frames are a world's, got {self.given} of none: add --world"
            )
        check("seed", self.seed)
        if self.pace is not None:
            check("pace", self.pace)
        if self.world is not None:
            check("world", self.world)
        check_prompt(self.prompt)
        from tachyscope.arguments import parse_prompt_files, parse_size

        size = parse_size(self.size)
        if parse_prompt_files(self.prompt_file)[1] and not prompt_changes:
            raise TachyscopeError(
                f"a prompt changes in generate alone, got {' and '.join(self.prompt_file)}: give "
                f"one --prompt-file without a frame"
            )
        return {
            "frames": self.frames, "prompt": self.prompt, "seed": self.seed, "size": size,
            "pace": self.pace,
        }  # fmt: skip

    def load(self, dtype: str | None = None) -> VideoModel:
        from tachyscope.arguments import parse_prompt_files
        from tachyscope.models.registry import load, with_prompt

        model = load(
            self.model, self.weights, device=self.device, dtype=dtype or self.dtype,
            decoder=self.decoder, decoder_check=self.decoder_check, lora=self.lora,
            lora_alpha=self.lora_alpha,
        )  # fmt: skip
        first, later = parse_prompt_files(self.prompt_file)
        return with_prompt(model, first, [name for _, name in later]) if first else model

    def visit(self, model: VideoModel) -> tuple[Visit | None, dict[str, Any]]:
        """The walk through the room that --world names, or None; and the rollout's actions.

        With the walk come its prompt, and the true frames that are given with their actions.
        """
        from tachyscope.arguments import parse_actions
        from tachyscope.models.registry import MODELS
        from tachyscope.worlds.visit import Visit

        if self.world is None:
            return None, {"actions": self.actions}
        if not MODELS[self.model].world:
            known = ", ".join(name for name, entry in MODELS.items() if entry.world)
            raise TachyscopeError(
                f"model {self.model!r} has no world whose truth is known, got --world "
                f"{self.world}: use {known}"
            )
        if self.prompt:
            raise TachyscopeError("a world brings its own prompt: leave --prompt or --world out")
        numbers = parse_actions(self.actions, model.actions, self.frames + self.given - 1)
        entry = MODELS[self.model]
        visit = Visit(self.world, numbers, pace=entry.pace, tempo=entry.tempo)
        if self.pace is not None and model.camera:  # a model without one refuses it
            visit = Visit(self.world, numbers, pace=self.pace)
        letters = [model.actions[number] for number in (0, *numbers)]
        return visit, {
            "prompt": visit.prompt,
            "first": visit.frames(0, self.given),
            "first_actions": " ".join(letters[: self.given]),
            "actions": " ".join(letters[self.given :]),
            **({"start": visit.view} if model.camera else {}),
        }

    def about(self) -> str:
        """A sentence of the model for a report's head."""
        from tachyscope.models.registry import MODELS

        entry = MODELS[self.model]
        random = entry.random or self.weights == "random"
        more = " Its weights are random, so its pictures say nothing of quality." if random else ""
        return f"Model: {entry.about}.{more}"


@dataclass(frozen=True, kw_only=True)
class CompileOptions(RolloutOptions):
    """And whether the model's layers are compiled first."""

    compile: bool | None = option(
        None,
        "Compile the layers of a Wan-type model first, or a token's step on a CPU; left out, where "
        "it pays.",
    )

    def compile_layers(self, model: VideoModel) -> bool:
        """Compile the model's layers where --compile says so, or it pays; whether it was done."""
        from tachyscope.arguments import parse_size
        from tachyscope.stream import chunks_for

        wanted = self.compile
        if wanted is None:
            chunk = model.shape(parse_size(self.size)).chunk
            wanted = model.compiling_pays(chunks_for(model, chunk, 0, self.frames))
        if wanted:
            model.compile()
        return wanted


@dataclass(frozen=True, kw_only=True)
class VideoVerb(RolloutOptions, PlanOptions):
    """A verb that makes videos by one plan."""

    def plan_text(self) -> str:
        """The plan's text with its changes, checked before a model is loaded."""
        from tachyscope.plan import POLICIES, check_text

        changes = []
        for part in POLICIES:
            spec = getattr(self, part)
            if spec is None:
                continue
            if spec.split() != [spec]:
                raise TachyscopeError(
                    f"--{part} is one policy without spaces, got {shown(spec)}: give another part "
                    f"by its own option, or all of them in --plan"
                )
            changes.append(f"{part}={spec}")
        text = " ".join([self.plan, *changes])
        check_text(text, kind_of(self.model))
        return text


@dataclass(frozen=True, kw_only=True)
class CompiledVerb(CompileOptions, VideoVerb):
    """A verb that makes videos by one plan, and may compile the model's layers first."""


def kind_of(model: str) -> str:
    """Which named plans a model means, as far as its name tells."""
    from tachyscope.models.registry import MODELS

    return MODELS[model].kind if model in MODELS else "chunks"
