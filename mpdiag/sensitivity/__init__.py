"""How sensitive operations are to a narrow format, and the smallest set that must stay in FP32."""
