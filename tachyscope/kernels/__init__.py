"""Operations on tensors, a folder each: the definition (reference.py) and its backends.

A table (dispatch.py) chooses the backend, by device, dtype and shape; callers never ask.
"""
