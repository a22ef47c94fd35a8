"""What a user types, a file for each kind of command. ``cli`` puts them together."""
