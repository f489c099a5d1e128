"""Small parts of our own trained models."""
