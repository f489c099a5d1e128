"""Functions of tensors, each beside its float64 reference."""
