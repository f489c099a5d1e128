"""The command line: one file a verb, whose options are one dataclass."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code of `io.process.run_command`."""
    # imported here, so that a verb's options can be read without cyclopts
    from tachyscope.cli.app import main

    return main(argv)
