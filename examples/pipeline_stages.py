"""Two stages of a pipeline, recorded as they train. `--compile` compiles block by block."""

import sys

import torch
from torch import nn

from mpdiag.integrations.loop import record_loop


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some blocks of the model, under the numbers that they have in the whole of it."""

    def __init__(self, *numbers, last=False):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})
        self.head = nn.Linear(16, 1) if last else nn.Identity()

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
stages = [Stage(0, 1), Stage(2, 3, last=True)]
for stage in stages:
    for block in stage.layers.values() if "--compile" in sys.argv else ():
        block.compile()
optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-3) for stage in stages]

with record_loop(stages, optimizers, "runs/stages", report_to="series.jsonl"):
    for _ in range(100):
        x = torch.randn(64, 16)
        loss = nn.functional.mse_loss(stages[1](stages[0](x)), x[:, :2].prod(1, keepdim=True))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
