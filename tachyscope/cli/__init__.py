"""The command line: one file a verb, whose options are one dataclass."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code, as `process.run_command` tells it."""
    # imported here: a verb's options are read without cyclopts
    from tachyscope.cli.app import main

    return main(argv)
