"""Running other people's training scripts, unmodified: recorded, or by a plan."""
