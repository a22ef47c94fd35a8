"""A plain loop at the top level of a script: criterion, scheduler, clipping."""

import torch
from script_end import report, seed
from torch import nn
from torch.nn import functional as F

torch.manual_seed(seed())
data = torch.randn(512, 12)
labels = (data[:, :3].sum(1) * data[:, 3] > 0).long()

model = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
criterion = nn.CrossEntropyLoss()

for step in range(100):
    rows = torch.randint(0, 512, (64,))
    optimizer.zero_grad()
    loss = criterion(model(data[rows]), labels[rows])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm < 100, "these are no true gradients"
    optimizer.step()
    scheduler.step()

model.eval()
with torch.no_grad():
    metric = F.cross_entropy(model(data), labels).item()
report(model, metric)
