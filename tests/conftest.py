"""Fixtures of all tests."""

from fixtures import _poison, own_policies, rng, serve_by_triton  # noqa: F401
