"""A second world, of another kind than Atrium: whether what is measured there is its quirk."""
