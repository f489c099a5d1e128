"""Saved streams: the file format, and folders of them."""
