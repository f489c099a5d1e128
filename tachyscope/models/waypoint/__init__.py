"""Waypoint 1.5: Overworld's world model of one latent frame at a time."""
