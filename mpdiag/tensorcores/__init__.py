"""Which kernels ran on Tensor Cores, why the others did not, and what that is worth."""
