"""Bring entries in the order of blocks, and guess which blocks a tile of queries attends to."""
