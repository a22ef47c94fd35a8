"""Counting exponents where a tensor lives: on the host with Numba, on a device with Triton."""
