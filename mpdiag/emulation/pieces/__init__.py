"""Layers that are emulated in one piece: the same roundings, without intercepting each operation."""
