"""Formats, exponent histograms, loss scalers, autocast lists: values and pure functions."""
