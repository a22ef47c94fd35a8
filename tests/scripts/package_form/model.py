"""Its model."""

from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 16), nn.Sigmoid(), nn.Linear(16, 1))
