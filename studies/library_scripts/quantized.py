"""torchao: ``quantized.py int8|nf4|int8-training|adamw8bit|adamw4bit|adamwfp8``.

``int8`` and ``nf4`` freeze quantized layers below an FP32 head; ``int8-training`` trains INT8 weights;
the others keep an optimizer's states in few bits.
"""

import sys
import warnings
from collections import OrderedDict

warnings.filterwarnings("ignore")

import torch
from torch import nn


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is stored in NF4."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        self.weight = nn.Parameter(to_nf4(inner.weight.detach().bfloat16()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x.bfloat16(), self.weight).to(x.dtype)


def main(kind: str) -> None:
    """Train for six steps."""
    torch.manual_seed(0)
    parts = OrderedDict(
        base=nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256)),
        norm=nn.LayerNorm(256),
        head=nn.Linear(256, 4),
    )
    model = nn.Sequential(parts)
    kept = torch.optim.AdamW
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.base, Int8WeightOnlyConfig())
        model.base.requires_grad_(False)
    elif kind == "nf4":
        model.base[0] = Nf4Linear(model.base[0])
        model.base.requires_grad_(False)
    elif kind == "int8-training":
        from torchao.optim.adam import _AdamW
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_

        quantize_(model.base, int8_weight_only_quantized_training())
        kept = _AdamW
    else:
        import torchao.optim

        names = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}
        kept = getattr(torchao.optim, names[kind])
    optimizer = kept([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(6):
        loss = model(torch.randn(8, 256)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
