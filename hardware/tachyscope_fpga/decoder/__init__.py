"""A whole LLaMA-type decoder of those parts: integers, hardware, registers, memory layout."""
