"""Accelerate's loop: ``accelerated.py bf16|fsdp2|fsdp2-bf16``.

With ``fsdp2`` its plugin is given a policy; a run on CPUs ignores the plugin without a word.
"""

import os
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


def main(kind: str) -> None:
    """Train for six steps."""
    torch.manual_seed(0)
    plugin = None
    if kind.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if "bf16" in kind else "no", fsdp_plugin=plugin
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    for _ in range(6):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
