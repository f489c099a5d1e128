"""Memory that a plan will take, predicted before it starts."""
