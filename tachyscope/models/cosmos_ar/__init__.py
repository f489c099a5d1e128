"""NVIDIA Cosmos, autoregressive: Predict1 4B and 12B."""
