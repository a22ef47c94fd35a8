"""Gradients of a step: checked, agreed over ranks, unscaled, clipped."""
