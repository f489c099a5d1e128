"""The command `tachyscope-lab`, and `python -m tachyscope_lab`."""

import sys

from tachyscope.io.process import guard_start, share_cores


def main() -> int:
    guard_start()
    share_cores()
    # imported here: it takes a while, in which Ctrl-C must be quiet too
    from tachyscope_lab.cli.app import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
