"""Skipped steps: what was at fault, and a capsule to run the step again."""
