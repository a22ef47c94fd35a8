"""What all figures share: colours, axes, a transparent ground."""
