"""A ResNet of bottlenecks with group norms and standardized weights, SGD with Nesterov momentum."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, BATCH, GROUPS, SMOOTHING = 8, 32, 16, 8, 0.1
WIDTHS, BLOCKS, EXPANSION = (16, 24, 32), (2, 2, 2), 4


class StdConv2d(nn.Conv2d):
    """Each filter's weights have mean 0 and variance 1 before they are used."""

    def forward(self, x):
        w = self.weight
        mean = w.mean(dim=(1, 2, 3), keepdim=True)
        var = w.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        w = (w - mean) / torch.sqrt(var + 1e-5)
        w = w * w[0].numel() ** -0.5
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


def conv3x3(in_planes, out_planes, stride=1):
    return StdConv2d(in_planes, out_planes, 3, stride=stride, padding=1, bias=False)


def conv1x1(in_planes, out_planes, stride=1):
    return StdConv2d(in_planes, out_planes, 1, stride=stride, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv1x1(inplanes, planes)
        self.norm1 = nn.GroupNorm(GROUPS, planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.norm2 = nn.GroupNorm(GROUPS, planes)
        self.conv3 = conv1x1(planes, planes * EXPANSION)
        self.norm3 = nn.GroupNorm(GROUPS, planes * EXPANSION)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.norm1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.norm3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inplanes = WIDTHS[0]
        self.conv1 = conv3x3(3, self.inplanes)
        self.norm1 = nn.GroupNorm(GROUPS, self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(WIDTHS[0], BLOCKS[0])
        self.layer2 = self._make_layer(WIDTHS[1], BLOCKS[1], stride=2)
        self.layer3 = self._make_layer(WIDTHS[2], BLOCKS[2], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(args.dropout)
        self.fc = nn.Linear(WIDTHS[2] * EXPANSION, CLASSES)
        self.reset_parameters()

    def _make_layer(self, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * EXPANSION:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * EXPANSION, stride),
                nn.GroupNorm(GROUPS, planes * EXPANSION),
            )
        layers = [Bottleneck(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * EXPANSION
        layers += [Bottleneck(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def reset_parameters(self):
        torch.manual_seed(5)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, Bottleneck):
                nn.init.constant_(m.norm3.weight, 0.5)
        nn.init.normal_(self.fc.weight, std=0.05)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = self.conv1(x)
        x = self.norm1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(self.dropout(x))


def pictures(g):
    """Gratings: a class is a direction. Colour, frequency and phase are random."""
    labels = torch.randint(0, CLASSES, (BATCH,), generator=g)
    angle = labels * (math.pi / CLASSES) + 0.05 * torch.randn(BATCH, generator=g)
    frequency = 0.5 + 0.7 * torch.rand(BATCH, generator=g)
    phase = 2 * math.pi * torch.rand(BATCH, generator=g)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    waves = torch.sin(frequency[:, None, None] * along + phase[:, None, None])
    colours = torch.randn(BATCH, 3, 1, 1, generator=g)
    images = colours * waves[:, None] + 0.4 * torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
    upside_down = torch.rand(BATCH, generator=g) < 0.5
    images = torch.where(upside_down[:, None, None, None], images.flip(2, 3), images)
    shift = torch.randint(-4, 5, (2,), generator=g).tolist()
    return images.roll(shift, dims=(2, 3)), labels


net = ResNet()
model = prepare(net, [net.layer1, net.layer2, net.layer3])
matrices = [p for p in net.parameters() if p.ndim > 1]
vectors = [p for p in net.parameters() if p.ndim == 1]
optimizer = torch.optim.SGD(
    [{"params": matrices, "weight_decay": 5e-4}, {"params": vectors, "weight_decay": 0.0}],
    lr=0.05,
    momentum=0.9,
    nesterov=True,
)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
for parts in batches(pictures):
    optimizer.zero_grad()
    for images, labels in parts:
        with autocast():
            output = model(images)
            loss = criterion(output, labels) / len(parts)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
finish()
