"""The one error that a user's fault raises."""


class TachyscopeError(Exception):
    """What was given, what is allowed, what to do; one line."""
