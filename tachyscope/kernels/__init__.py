"""Operations on tensors, a folder each: the definition (reference.py) and its backends.

An operation's `__init__` chooses the backend, by device, dtype and shape; its callers never ask.
"""
