"""What a user types: one file for each command. ``cli`` lists them in the order of the help."""
