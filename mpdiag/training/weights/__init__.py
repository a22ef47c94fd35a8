"""Weights and buffers in the precision of a level: masters, FP32 regions, undoing a step."""
