"""Hostile files: good ones of every kind, what reads them, and how they are corrupted."""
