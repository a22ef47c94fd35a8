"""The smallest set of operations that must stay in FP32, found by training."""
