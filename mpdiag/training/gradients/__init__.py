"""Gradients of a step: scaled, judged, reduced over ranks."""
