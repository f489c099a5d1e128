"""What a model and a plan are worth in worlds whose truth is known."""

import tachyscope_lab.rivals  # noqa: F401, plans may name them
