"""Did the matrix multiplications run on Tensor Cores, and if not, why not?"""
