"""What the measured operations made of Tensor Cores: eligible against used, and the rate achieved."""
