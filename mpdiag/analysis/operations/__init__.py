"""Finds the operations that must stay in FP32, by rules over operation records."""
