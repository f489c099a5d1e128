"""`python -m tachyscope`."""

import sys

from tachyscope.cli import main

sys.exit(main())
