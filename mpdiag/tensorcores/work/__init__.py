"""The matrix work of operations and models: M, N, K, FLOP and bytes."""
