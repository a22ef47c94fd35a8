"""Tidy DataFrames: the numbers of every figure, computed without drawing anything."""
