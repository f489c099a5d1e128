"""Around the hardware: simulators, comparison with the integers, bounded checks, synthesis."""
