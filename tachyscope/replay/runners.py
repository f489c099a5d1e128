"""Which runner serves a replay policy, and what it keeps beside a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.calibration import Calibration
from tachyscope.replay import ReplayPolicy, TokenReplay
from tachyscope.replay.input import Input
from tachyscope.replay.neuron_runner import NeuronRunner, neuron_tensors
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.replay.runner import ReplayRunner, token_tensors
from tachyscope.types import Shape


def runner_of(
    policy: ReplayPolicy | None, calibration: Calibration | None
) -> ReplayRunner | NeuronRunner:
    """What runs MLPs under a policy, or computes them all without one."""
    if isinstance(policy, NeuronReplay):
        return NeuronRunner(policy, calibration)
    assert policy is None or isinstance(policy, TokenReplay)
    if isinstance(policy, Input):
        ready = policy.calibrated(calibration)
        return ReplayRunner(ready, ready.by_layer(calibration))
    return ReplayRunner(policy)


def replay_tensors(
    policy: ReplayPolicy | None, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Fixed tensors to keep beside a layer."""
    if isinstance(policy, NeuronReplay):
        return neuron_tensors(policy, shape, dtype, device)
    assert policy is None or isinstance(policy, TokenReplay)
    return token_tensors(policy, shape, dtype, device)
