"""Analyses of which every view is drawn."""

from drawn_runs import analysis

__all__ = ["analysis"]
