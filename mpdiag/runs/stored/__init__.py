"""What was made of a run later and is kept in its folder: a comparison, a profile, a search."""
