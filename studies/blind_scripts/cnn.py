"""A residual network with batch norm, taught by labels and by an average of itself (mean teacher)."""

import copy

import torch.nn.functional as F
from common import autocast, batches, finish, nn, prepare, scaler, torch


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside, eps=1e-5, momentum=0.1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.short = nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.stage1 = Block(8, 8, 1)
        self.stage2 = Block(8, 16, 2)
        self.stage3 = Block(16, 16, 1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.fc(x.mean((2, 3)))


def update(teacher, student, keep=0.9):
    with torch.no_grad():
        for mean, new in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.mul_(keep).add_(new, alpha=1 - keep)
        for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
            old.copy_(new)


images = torch.rand(16, 3, 12, 12, generator=torch.Generator().manual_seed(7))
mean, std = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])
labels = torch.randint(0, 10, (16,), generator=torch.Generator().manual_seed(8))
model = ResNet()
teacher = copy.deepcopy(model).requires_grad_(False).eval()
model = prepare(model)
decay = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.SGD(
    [{"params": decay, "weight_decay": 5e-3}, {"params": others, "weight_decay": 0.0}],
    lr=0.1,
    momentum=0.9,
    nesterov=True,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
for parts in batches(lambda g: [torch.randperm(16, generator=g)]):
    model.train()
    optimizer.zero_grad()
    for (rows,) in parts:
        x = (images - mean[:, None, None]) / std[:, None, None]
        with autocast():
            logits = model(x[rows])
            with torch.no_grad():
                soft = teacher(x[rows])
        loss = F.cross_entropy(logits.float(), labels[rows], label_smoothing=0.1)
        loss = loss + 0.5 * F.mse_loss(logits.float().softmax(-1), soft.float().softmax(-1))
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    update(teacher, model)
    scheduler.step()
finish()
