"""Wan-type causal diffusion models."""
