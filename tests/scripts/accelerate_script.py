"""Hugging Face Accelerate: prepare, accumulate, backward and clip through the accelerator."""

import sys
import warnings

import torch
from script_end import report, seed
from torch import nn

warnings.filterwarnings("ignore")
try:
    from accelerate import Accelerator
except ImportError:
    sys.exit("this script needs accelerate")

torch.manual_seed(seed())
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(256, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
data = torch.utils.data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40)
loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _ in range(8):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

with torch.no_grad():
    metric = nn.functional.cross_entropy(model(x), y).item()
report(model, metric)
