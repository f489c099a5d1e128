"""The engine: plans, sessions, streams and what callers hand in."""
