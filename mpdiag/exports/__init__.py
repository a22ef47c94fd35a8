"""A plan as the settings of other frameworks: pure functions from a plan to text."""
