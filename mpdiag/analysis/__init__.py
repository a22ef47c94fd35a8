"""From recorded histograms to findings and a plan; no tensor, no torch."""
