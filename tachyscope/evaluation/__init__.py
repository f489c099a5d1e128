"""What a model and a plan are worth in worlds whose truth is known."""
