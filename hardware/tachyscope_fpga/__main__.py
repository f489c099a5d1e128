"""The command `tachyscope-fpga`, and `python -m tachyscope_fpga`."""

import sys

from tachyscope_fpga.cli import main

if __name__ == "__main__":
    sys.exit(main())
