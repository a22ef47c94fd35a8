"""What devices can do: kernel names, alignment, peak rates, capabilities, settings."""
