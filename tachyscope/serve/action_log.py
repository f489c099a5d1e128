"""The action log: a session's opening and steps, which make the same video again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from tachyscope.core.errors import TachyscopeError, shown

VERSION = 1
GIVEN_MOST = 256  # steps
HEAD = {"version", "model", "weights", "opening", "steps"}


@dataclass(frozen=True)
class Opening:
    """What a session begins with."""

    plan: str
    prompt: str = ""
    seed: int = 0
    world: int | None = None
    strength: float = 0.0  # noise on pictures of the client's camera that it follows; 0: none
    given: int = 0  # first steps whose frames are the world's true ones, and not made
    image: str = ""  # the picture that it begins with: a file in base64


class Step(NamedTuple):
    """One chunk: the action of its frames, and the prompt that began with it, if one did."""

    actions: str = ""
    prompt: str | None = None


@dataclass
class ActionLog:
    """A session from its beginning; it grows by a step a chunk."""

    model: str
    weights: str  # the model's fingerprint
    opening: Opening
    steps: list[Step] = field(default_factory=list)

    def prompt_before(self, chunk: int) -> str:
        """The prompt in effect after `chunk` steps."""
        prompts = [step.prompt for step in self.steps[:chunk] if step.prompt is not None]
        return prompts[-1] if prompts else self.opening.prompt

    def to_json(self) -> dict[str, Any]:
        steps = [one.actions if one.prompt is None else list(one) for one in self.steps]
        return {
            "version": VERSION,
            "model": self.model,
            "weights": self.weights,
            "opening": asdict(self.opening),
            "steps": steps,
        }

    @classmethod
    def from_json(cls, value: Any, model: str, weights: str, actions: str) -> ActionLog:
        """Parse a saved log; one that is malformed or of another model raises TachyscopeError."""
        if not isinstance(value, dict) or set(value) != HEAD:
            raise TachyscopeError(f"an action log is an object of {', '.join(sorted(HEAD))}")
        if value["version"] != VERSION:
            raise TachyscopeError(f"an action log has version {VERSION}: save it again")
        if (value["model"], value["weights"]) != (model, weights):
            raise TachyscopeError(
                f"this action log is of another model or other weights; here is {model}"
            )
        opening = value["opening"]
        # defaults of fields that older logs lack
        later: dict[str, Any] = {"given": 0, "strength": 0.0, "image": ""}
        fields = set(Opening.__dataclass_fields__)
        if not isinstance(opening, dict) or set(opening) | set(later) != fields:
            raise TachyscopeError(
                f"an action log's opening has {', '.join(Opening.__dataclass_fields__)}"
            )
        opening = {**later, **opening}
        checks = {
            "plan": str, "prompt": str, "seed": int, "world": int | None, "given": int,
            "strength": int | float, "image": str,
        }  # fmt: skip
        for name, kind in checks.items():
            part = opening[name]
            if not isinstance(part, kind) or isinstance(part, bool):
                raise TachyscopeError(f"an action log's {name} is of another type: save it again")
        if opening["strength"]:
            raise TachyscopeError(
                "this action log is of a session that followed a camera, whose pictures no log "
                "holds: play another"
            )
        if not 0 <= opening["given"] <= GIVEN_MOST:
            raise TachyscopeError(
                f"an action log's given steps are from 0 to {GIVEN_MOST}, got "
                f"{shown(opening['given'])}: save it again"
            )
        if not isinstance(value["steps"], list):
            raise TachyscopeError("an action log's steps are a list")
        return cls(model, weights, Opening(**opening), read_steps(value["steps"], actions))


def read_steps(value: Sequence[Any], actions: str) -> list[Step]:
    """Steps as they were saved; `actions` are the model's letters."""
    steps = []
    for i, one in enumerate(value):
        pair = one if isinstance(one, list) else [one, None]
        if (
            len(pair) != 2
            or not isinstance(pair[0], str)
            or not set(pair[0]) <= set(actions)
            or not isinstance(pair[1], str | None)
        ):
            raise TachyscopeError(
                f"step {i} of an action log is letters of {actions!r}, or those and a prompt"
            )
        steps.append(Step(*pair))
    return steps
