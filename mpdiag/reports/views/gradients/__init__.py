"""Histograms of exponents, layer by layer: tables, figures, receipts, and the pictures of all three."""
