"""Layers: all of them over the steps, one of them in full, and those that move at one step."""
