"""Where two runs part, beyond what rounding explains."""
