"""Kernels that a run of scripts/tune_decode.py has found right and faster than what they replace.

A kernel that no GPU has run yet is not among them: what was measured before runs in its place.
"""

CHOSEN: set[str] = set()
