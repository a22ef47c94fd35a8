"""Plotly figures, each drawn from a tidy DataFrame and nothing else."""
