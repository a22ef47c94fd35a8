"""A script that already trains in mixed precision, with autocast and GradScaler of torch."""

import torch
from script_end import report, seed
from torch import nn

torch.manual_seed(seed())
x = torch.randn(256, 16)
y = (x[:, :4] * x[:, 4:8]).sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

for _ in range(80):
    rows = torch.randint(0, 256, (64,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    assert norm < 200, "these are no true gradients"
    scaler.step(optimizer)
    scaler.update()

with torch.no_grad():
    metric = nn.functional.mse_loss(model(x), y).item()
report(model, metric)
print("scale", scaler.get_scale())
