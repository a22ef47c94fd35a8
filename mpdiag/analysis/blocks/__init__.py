"""Block formats: what each operand of a matrix product loses, and which layers stay in BF16."""
