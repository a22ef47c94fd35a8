"""How much each operation suffers in a narrow format, and the smallest set that stays in FP32."""
