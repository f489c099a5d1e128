"""The verbs of `tachyscope-lab`: a module each."""
