"""Fixtures of all tests, and the rivals, which plans name."""

from fixtures import _poison, own_policies, rng  # noqa: F401

import tachyscope_lab.rivals  # noqa: F401
