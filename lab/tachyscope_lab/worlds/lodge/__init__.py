"""Lodge: four furnished rooms around which one walks, with an exact picture of every pose.

Everything is a pure function of a seed, a pose and a time, in batched torch, alike on every device.
"""
