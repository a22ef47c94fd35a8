"""What scripts with sharded parameters print at their end."""

import hashlib

import torch
from torch import nn


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def report(model, rank):
    """The digest of all weights, and the error on data of its own; every rank takes part."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole(parameter).detach().numpy().tobytes())
    torch.manual_seed(7)
    x = torch.randn(512, 8)
    with torch.no_grad():
        metric = nn.functional.mse_loss(model(x), x[:, :2].prod(1, keepdim=True)).item()
    if rank == 0:
        print("digest", digest.hexdigest(), "metric", metric)
