"""The figures that claims are made with: one table, which every surface reads."""
