"""The verdict: what was shown, what is expected, and what was not looked at."""
