"""Tachyscope inside other people's code: a cache for attention layers, and adapters by model."""
