"""Which operations must stay in FP32, by rules over operation records."""
