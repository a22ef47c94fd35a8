"""A convolutional net compiled behind --torchcompile, in the shape of ``train.py`` of huggingface/pytorch-image-models."""

import argparse
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--torchcompile", nargs="?", type=str, default="inductor", const="inductor")
parser.add_argument("--torchcompile-mode", type=str, default=None)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)
digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(cin, cout, 1, stride) if stride > 1 else None

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.act2(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))) + shortcut)


layers = [
    nn.Conv2d(1, 16, 3, 1, 1),
    BasicBlock(16, 16, 1),
    BasicBlock(16, 32, 2),
    nn.AdaptiveAvgPool2d(1),
]
model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)).to(
    memory_format=torch.channels_last
)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
model_ema = deepcopy(model)
raw_model = model
if args.torchcompile:
    model = torch.compile(model, backend=args.torchcompile, mode=args.torchcompile_mode)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=48)
for _ in range(2):
    model.train()
    for index in torch.randperm(1536).split(64):
        x, lam = images[index].contiguous(memory_format=torch.channels_last), torch.rand(()).item()
        y = F.one_hot(labels[index], 10).float()
        x, y = (
            x * (0.5 + lam / 2) + x.flip(0) * (0.5 - lam / 2),
            y * (0.5 + lam / 2) + y.flip(0) * (0.5 - lam / 2),
        )
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(model_ema.parameters()), list(raw_model.parameters()), 0.1)
    model.eval()
    with torch.inference_mode():
        top1 = (model(images[1536:]).argmax(1) == labels[1536:]).float().mean().item()
if args.save:
    torch.save({"model": raw_model.state_dict(), "ema": model_ema.state_dict()}, args.save)
print(f"top: {top1:.6f}")
