"""What kernel names mean: the rules by subject, and the readers of what all names spell alike."""
