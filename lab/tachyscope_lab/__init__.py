"""How Tachyscope's numbers are made. It imports tachyscope, which never imports it."""

__version__ = "0.1.0"
