"""What the terminal and documents say of a profile."""
