"""What of torch is replaced while a script trains by a plan."""
