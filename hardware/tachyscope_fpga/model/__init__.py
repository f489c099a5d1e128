"""How long it takes: the engine's cycles, HBM, boards, workloads, estimates."""
