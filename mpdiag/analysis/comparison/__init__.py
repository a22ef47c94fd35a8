"""FP32 against mixed precision over seeds: metrics, curves, equivalence."""
