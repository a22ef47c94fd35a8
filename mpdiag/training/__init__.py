"""Mixed-precision training by a plan: levels, operation policy, FP16 emulation, masters, steps."""
