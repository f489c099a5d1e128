"""Model families: what a stream needs of a model, and how checkpoints are read."""
