"""Sessions on many machines: the package's only use of Ray."""
