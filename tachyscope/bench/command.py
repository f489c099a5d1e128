"""Verbs without the command line's packages: words in, a document out, faults of one line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tachyscope.bench.cpu import bench_asked, lines, split_plans
from tachyscope.bench.wan import TABLES, bench_wan_asked, wan_lines
from tachyscope.errors import TachyscopeError, as_typed
from tachyscope.models.registry import load
from tachyscope.process import run_command
from tachyscope.results import Document, check_json, emit


class Parser(argparse.ArgumentParser):
    """A verb without the command line's packages: argparse, with faults of one line."""

    def error(self, message: str) -> NoReturn:
        raise TachyscopeError(message)

    def run(
        self,
        words: Sequence[str],
        measure: Callable[[argparse.Namespace, str], Document],
        told: Callable[[Document], list[str]],
    ) -> int:
        """Measure what the words ask for, tell it, and write it where --json says; an exit code."""
        self.add_argument("--json", help="a file, or - for the last line of stdout")
        self.add_argument("--traceback", action="store_true", help="also tell where a fault arose")

        def command() -> None:
            args = self.parse_args(words)
            try:
                check_json(args.json)
                found = measure(args, f"{self.prog} {shlex.join(words)}")
            except TachyscopeError as error:
                raise TachyscopeError(as_typed(str(error), vars(args))) from error
            print("\n".join(told(found)))
            emit(found, args.json)

        return run_command(command, show_traceback="--traceback" in words)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb `bench` without the command line's packages."""
    words = list(sys.argv[1:] if argv is None else argv)
    about = "Time plans against dense, and dense against itself."
    parser = Parser("python -m tachyscope.bench", description=about)
    verbs = {"cpu": _cpu, "wan": _wan}
    parser.add_argument("suite", choices=list(verbs), help="`cpu --help` tells its options")
    return run_command(lambda: parser.parse_args(words[:1])) or verbs[words[0]](words[1:])


def _cpu(words: Sequence[str]) -> int:
    parser = Parser("python -m tachyscope.bench cpu")
    parser.add_argument("--model", default="toy-chunks")
    parser.add_argument("--plans", default="fast;balanced", help="set apart by ';'")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at", help="latent frames before single chunks, set apart by commas")

    def measure(args: argparse.Namespace, command: str) -> Document:
        plans = split_plans(args.plans)
        return bench_asked(
            load(args.model), plans, at=args.at, frames=args.frames, rounds=args.rounds,
            command=command,
        )  # fmt: skip

    return parser.run(words, measure, lines)


def _wan(words: Sequence[str]) -> int:
    parser = Parser("python -m tachyscope.bench wan")
    parser.add_argument("--model", default="self-forcing", help="a preset, or a size: wan_14b")
    parser.add_argument("--weights", help="a checkpoint; left out, weights are random")
    parser.add_argument("--table", default="main", help=f"rows: {', '.join(TABLES)}")
    parser.add_argument("--rows", help="names of rows, or plans, set apart by ';'")
    parser.add_argument("--size", default="480x832", help="HEIGHTxWIDTH in pixels")
    parser.add_argument("--lengths", help="latent frames before timed chunks, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollout", type=int, help="make so many frames by each row instead")
    parser.add_argument("--decode", action="store_true", help="of a rollout, also what is shown")
    parser.add_argument("--decoder", help="decode by a tiny decoder's file, or by random-tiny")
    parser.add_argument("--traced", action="store_true", help="caches from a trained model")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)

    def measure(args: argparse.Namespace, command: str) -> Document:
        return bench_wan_asked(
            args.model, args.weights, table=args.table, rows=args.rows, size=args.size,
            lengths=args.lengths, rounds=args.rounds, rollout=args.rollout, decode=args.decode,
            decoder=args.decoder, traced=args.traced, compile=args.compile, device=args.device,
            dtype=args.dtype, seed=args.seed, json=args.json, command=command,
        )  # fmt: skip

    return parser.run(words, measure, wan_lines)
