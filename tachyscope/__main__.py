"""The command `tachyscope`, and `python -m tachyscope`."""

import sys

from tachyscope.io.process import guard_start, share_cores


def main() -> int:
    guard_start()
    share_cores()
    # imported here: it takes a while, in which Ctrl-C must be quiet too
    from tachyscope.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
