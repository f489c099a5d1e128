"""The verb `eval` without the command line's packages: `python -m tachyscope.evaluation atrium`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from tachyscope.bench import Parser
from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.atrium import PARTS, evaluate_atrium, lines
from tachyscope.evaluation.world import TABLES, table
from tachyscope.results import check_json, emit


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    prog = "python -m tachyscope.evaluation"
    parser = Parser(prog=prog, description="Measure models and plans on unseen worlds.")
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
    parser.add_argument("--json", help="a file, or - for the last line of stdout")
    try:
        args = parser.parse_args(words)
        check_json(args.json)
        found = evaluate_atrium(
            [*(table(args.table) if args.table else []), *(args.plan or [])],
            only=args.only, worlds=args.worlds, device=args.device, seed=args.seed,
            quick=args.quick, command=f"{prog} {shlex.join(words)}", watch=watch,
            frames=args.frames, recall=not args.no_recall, world=not args.plans_only,
            own=args.own, jobs=args.jobs, timed=not args.no_clock,
        )  # fmt: skip
        print("\n".join(lines(found)))
        emit(found, args.json)
    except TachyscopeError as error:
        print(f"tachyscope: {error}", file=sys.stderr)
        return 2
    return 0


def watch(what: str, done: int) -> None:
    print(f"{done} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
