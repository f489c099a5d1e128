"""`python -m tachyscope.bench cpu` and `python -m tachyscope.bench wan`."""

import sys

from tachyscope.bench.command import main

sys.exit(main())
