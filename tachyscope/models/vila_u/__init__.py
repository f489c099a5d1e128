"""VILA-U-type token models."""
