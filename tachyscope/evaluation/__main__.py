"""The verb `eval` without the command line's packages: `python -m tachyscope.evaluation atrium`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from tachyscope.bench import Parser
from tachyscope.evaluation.atrium import PARTS, evaluate_atrium, lines
from tachyscope.evaluation.world import TABLES, table
from tachyscope.results import Document


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    about = "Measure models and plans on unseen worlds."
    parser = Parser("python -m tachyscope.evaluation", description=about)
    parser.add_argument("what", choices=["atrium"])
    parser.add_argument("--plan", action="append", help="may be given several times")
    parser.add_argument("--table", help=f"plans of a table: {', '.join(TABLES)}")
    parser.add_argument("--only", choices=PARTS, default="both", help="one of the models")
    parser.add_argument("--worlds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-recall", action="store_true")
    parser.add_argument("--plans-only", action="store_true", help="nothing of the model itself")
    parser.add_argument("--own", action="store_true", help="plans' memory of what is made up")
    parser.add_argument("--no-clock", action="store_true", help="no time of a token")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, help="processes; as many as cores")

    def measure(args: Namespace, command: str) -> Document:
        return evaluate_atrium(
            [*(table(args.table) if args.table else []), *(args.plan or [])],
            only=args.only, worlds=args.worlds, device=args.device, seed=args.seed,
            quick=args.quick, command=command, watch=watch, frames=args.frames,
            recall=not args.no_recall, world=not args.plans_only, own=args.own, jobs=args.jobs,
            timed=not args.no_clock,
        )  # fmt: skip

    return parser.run(words, measure, lines)


def watch(what: str, done: int) -> None:
    print(f"{done} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
