"""What these scripts have in common: the seed in their arguments, and what they print at their end."""

import hashlib
import sys

import torch
from torch import nn


def seed():
    return int(sys.argv[1]) if len(sys.argv) > 1 else 0


def report(model, metric, rank=0):
    """Print the digest of all weights, and the metric; every rank takes part."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole = whole.float() if whole.dtype == torch.bfloat16 else whole  # NumPy has none
        digest.update(whole.numpy().tobytes())
    if rank == 0:
        print("digest", digest.hexdigest(), "metric", metric, flush=True)


@torch.no_grad()
def error_of(model):
    """The error on data of its own, where a product of two inputs was to be learned."""
    torch.manual_seed(7)
    x = torch.randn(512, 8)
    return nn.functional.mse_loss(model(x), x[:, :2].prod(1, keepdim=True)).item()
