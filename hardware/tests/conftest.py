"""The depth transformer's test has the float model beside it, which is tachyscope's."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("tachyscope") else ["test_fpga_depth.py"]
