"""FP16 and BF16 arithmetic emulated on any device."""
