"""Checks and normalises what callers pass in, before any work begins."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown, warn
from tachyscope.core.limits import ASKED, check
from tachyscope.core.plan import Plan, replaced
from tachyscope.core.ranks import Ranks
from tachyscope.io.calibration import Calibration
from tachyscope.models.base import VideoModel
from tachyscope.models.checkpoint import read_tensors
from tachyscope.replay.input import InputReplay
from tachyscope.replay.neurons import NeuronReplay

if TYPE_CHECKING:
    # letters with counts, or one letter or index a frame
    Actions = str | Sequence[str] | Sequence[int] | np.ndarray | Tensor


def check_model(model: Any) -> VideoModel:
    load = f"tachyscope.load({model!r})" if isinstance(model, str) else "tachyscope.load(NAME)"
    fault = f"model must be a loaded model, got {shown(model)}: use {load}"
    checked = VideoModel.narrow(model, fault)
    for name in ("transformer", "size"):
        if not hasattr(checked, name):
            raise TachyscopeError(f"{type(model).__name__} has no `{name}`: set self.{name}")
    return checked


def check_whole(name: str, value: Any, what: str = "") -> int:
    """A whole number within the bound ASKED[name]; Python's, NumPy's or a tensor with one."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TachyscopeError(
            f"{what or f'`{name}`'} must be a whole number {ASKED[name]}, got {shown(value)}"
        )
    return check(name, number, what)


def check_prompt(prompt: Any, name: str = "prompt") -> str:
    if not isinstance(prompt, str):
        raise TachyscopeError(
            f"{name} must be text, got {shown(prompt)}: give one string, '' for no prompt"
        )
    return prompt


def check_changes(then: Any) -> list[tuple[int, str]]:
    """The prompt changes of `then`: (frame, prompt) pairs."""
    changes = []
    for change in items_of(then, "then", "(frame, prompt) pairs", "[(24, 'a blue room')]"):
        if not isinstance(change, tuple | list) or len(change) != 2:
            raise TachyscopeError(
                f"then must be (frame, prompt) pairs, got {shown(change)}: try "
                f"[(24, 'a blue room')]"
            )
        frame = check_whole("frames", change[0], "a frame of `then`")
        changes.append((frame, check_prompt(change[1], "a prompt of then")))
    return changes


def parse_mesh(model: VideoModel, mesh: Any) -> Ranks | None:
    """The ranks of a mesh, which make one stream together; None without a mesh."""
    if mesh is None:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TachyscopeError(
            f"mesh must be a DeviceMesh of one dimension, got {shown(mesh)}: try "
            f"torch.distributed.device_mesh.init_device_mesh('cuda', (2,))"
        )
    if mesh.device_type != model.device.type:
        raise TachyscopeError(
            f"the model is on {model.device} and the mesh on {mesh.device_type}: make both on one "
            f"kind of device"
        )
    if not model.splits_tokens:
        raise TachyscopeError(
            f"{model.name} computes all tokens by itself, which {mesh.size()} ranks cannot share: "
            f"start one process, or take a Wan-type model"
        )
    return Ranks(mesh)


def parse_plan(model: VideoModel, plan: Plan | str) -> Plan:
    """A plan, parsed for a model; warns if its changes drop settings of its base.

    For a model without a prompt, the base's text policy is dropped, and an explicit one is refused.
    """
    if isinstance(plan, Plan):
        return _known(plan.for_shape(model.shape()), model)
    if not isinstance(plan, str):
        raise TachyscopeError(
            f"plan must be text or a Plan, got {shown(plan)}: try 'fast', or "
            f"'fast cache=bank:resident=12f'"
        )
    for line in replaced(plan, model.kind, model.stock):
        warn(f"plan {shown(plan)}: {line}")
    parsed, shape = Plan.parse(plan, model.kind, model.stock), model.shape()
    if parsed.text is not None and any(word.startswith("text=") for word in plan.split()):
        parsed.text.check_plan(parsed, shape)
    return _known(parsed.for_shape(shape), model)


def _known(plan: Plan, model: VideoModel) -> Plan:
    """The plan; warns of a replay that was measured to lose quality under camera actions."""
    if model.kind == "tokens" and model.actions and plan.replay and plan.replay.measured_loss:
        warn(f"replay={plan.replay.label} {plan.replay.measured_loss}")
    return plan


def parse_calibration(model: VideoModel, plan: Plan) -> Calibration | None:
    """The calibration that a plan's replay needs: the file it names, or the model's own."""
    policy = plan.replay
    if isinstance(policy, NeuronReplay):
        needed = policy.share > 0
    else:
        needed = (
            isinstance(policy, InputReplay) and policy.share is None and policy.threshold is None
        )
    if not needed:
        return None
    assert isinstance(policy, NeuronReplay | InputReplay)
    path = model.calibration if policy.file is None else Path(policy.file)
    return None if path is None else Calibration.of(read_tensors(path), str(path))


def parse_actions(actions: Actions, letters: str, frames: int) -> list[int]:
    """One action per frame, as indices into the model's letters; missing ones are 0, "stay".

    Text has letters with repeat counts (`w*20 a*24`); a list, array or tensor has one letter or
    index per frame.
    """
    if isinstance(actions, str):
        moves = _moves_of_text(actions, letters, frames)
    else:
        given = listed_actions(actions)
        if given and not letters:
            raise TachyscopeError(
                f"this model takes no actions, got {shown(given[0])}: leave them out"
            )
        _check_count(len(given), frames)
        moves = [_move(action, letters) for action in given]
    return moves + [0] * (frames - len(moves))


def listed_actions(actions: Any) -> list[Any]:
    """Actions given as a list, an array or a tensor: one per frame."""
    return items_of(actions, "actions", "text, or a list of letters or indices", "'w*20 a*24'")


def _check_count(actions: int, frames: int) -> None:
    if actions > frames:
        raise TachyscopeError(
            f"`actions` are given for {actions} frames, but only {frames} are made: raise "
            f"`frames` or shorten the actions"
        )


def _moves_of_text(text: str, letters: str, frames: int) -> list[int]:
    runs: list[tuple[int, int]] = []
    for word in text.split():
        match = re.fullmatch(r"(\S)(?:\*(\d{1,6}))?", word)
        if not letters:
            raise TachyscopeError(f"this model takes no actions, got {shown(word)}: leave them out")
        if match is None or match[1] not in letters:
            raise TachyscopeError(
                f"`actions`: this model takes letters of {letters!r}, each with *count, got "
                f"{shown(word)}: try {letters[:2][-1]}*20"
            )
        runs.append((letters.index(match[1]), int(match[2] or 1)))
    _check_count(sum(count for _, count in runs), frames)
    return [action for action, count in runs for _ in range(count)]


def _move(action: Any, letters: str) -> int:
    if isinstance(action, str) and len(action) == 1 and action in letters:
        return letters.index(action)
    try:
        index = -1 if isinstance(action, str | bool | np.bool_) else operator.index(action)
    except TypeError:
        index = -1
    if not 0 <= index < len(letters):
        raise TachyscopeError(
            f"`actions`: this model takes one letter of {letters!r} a frame, or its index from 0 "
            f"to {len(letters) - 1}, got {shown(action)}: give one of these"
        )
    return index


def items_of(given: Any, name: str, allowed: str, example: str) -> list[Any]:
    """The items of a list, a tuple, or an array or tensor of one dimension."""
    if isinstance(given, np.ndarray | Tensor):
        if given.ndim != 1:
            shape = list(given.shape)
            raise TachyscopeError(f"{name} has one dimension, got {shape}: flatten it")
        items: list[Any] = given.tolist()
        return items
    if not isinstance(given, list | tuple):
        raise TachyscopeError(f"{name} must be {allowed}, got {shown(given)}: try {example}")
    return list(given)
