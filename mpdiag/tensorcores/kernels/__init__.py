"""What kernels are by their names and their hardware counters."""
