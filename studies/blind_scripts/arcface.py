"""Face recognition: a ResNet as insightface writes it, and ArcFace's margin over identities."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

IDENTITIES, SIZE, BATCH, LR = 24, 32, 24, 0.05


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, 3, stride=stride, padding=1, bias=False)


def norm2d(planes):
    return nn.BatchNorm2d(planes, eps=1e-5)


class IBasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.bn1 = norm2d(inplanes)
        self.conv1 = conv3x3(inplanes, planes)
        self.bn2 = norm2d(planes)
        self.prelu = nn.PReLU(planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn3 = norm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.bn1(x)
        out = self.conv1(out)
        out = self.bn2(out)
        out = self.prelu(out)
        out = self.conv2(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        return out + identity


class SEModule(nn.Module):
    """Weighs channels by what the whole picture has in them."""

    def __init__(self, channels, reduction=4):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1, bias=False)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1, bias=False)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale))
        return x * torch.sigmoid(self.fc2(scale))


class IResNet(nn.Module):
    def __init__(self, layers=(1, 2, 1), widths=(16, 32, 48), num_features=32):
        super().__init__()
        self.inplanes = widths[0]
        self.conv1 = conv3x3(3, self.inplanes)
        self.bn1 = norm2d(self.inplanes)
        self.prelu = nn.PReLU(self.inplanes)
        self.layer1 = self._make_layer(widths[0], layers[0])
        self.layer2 = self._make_layer(widths[1], layers[1])
        self.layer3 = self._make_layer(widths[2], layers[2])
        self.se = SEModule(widths[2])
        self.bn2 = norm2d(widths[2])
        self.dropout = nn.Dropout(args.dropout)
        self.fc = nn.Linear(widths[2] * (SIZE // 8) ** 2, num_features)
        self.features = nn.BatchNorm1d(num_features, eps=1e-5)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        self.features.weight.requires_grad = False

    def _make_layer(self, planes, blocks):
        downsample = nn.Sequential(
            nn.Conv2d(self.inplanes, planes, 1, stride=2, bias=False), norm2d(planes)
        )
        layers = [IBasicBlock(self.inplanes, planes, 2, downsample)]
        self.inplanes = planes
        layers += [IBasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.bn2(self.se(x))
        x = torch.flatten(x, 1)
        x = self.fc(self.dropout(x))
        return self.features(x)


class ArcFace(nn.Module):
    """Cosines to the identities' centres; the angle to the own one grows by the margin."""

    def __init__(self, in_features, out_features, s=32.0, m=0.5):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.normal_(self.weight, std=0.05)

    def forward(self, embeddings, labels):
        with torch.autocast("cpu", enabled=False):
            cosine = F.linear(F.normalize(embeddings.float()), F.normalize(self.weight))
        cosine = cosine.clamp(-1 + 1e-7, 1 - 1e-7)
        theta = torch.acos(cosine)
        one_hot = F.one_hot(labels, cosine.size(1)).to(cosine.dtype)
        logits = torch.cos(theta + self.m * one_hot)
        return logits * self.s


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = IResNet()
        self.head = ArcFace(32, IDENTITIES)

    def forward(self, images, labels):
        return self.head(self.backbone(images), labels)


def faces(g):
    """Each identity has a coarse pattern of its own; pictures differ in light and are flipped."""
    labels = torch.randint(0, IDENTITIES, (BATCH,), generator=g)
    patterns = torch.rand(IDENTITIES, 3, 6, 6, generator=torch.Generator().manual_seed(7))
    pixels = F.interpolate(patterns[labels], size=(SIZE, SIZE), mode="bilinear")
    light = 0.7 + 0.4 * torch.rand(BATCH, 1, 1, 1, generator=g)
    pixels = pixels * light + 0.2 * torch.rand(BATCH, 3, SIZE, SIZE, generator=g)
    pixels = (pixels * 200).clamp(0, 255).floor()
    flipped = torch.rand(BATCH, 1, 1, 1, generator=g) < 0.5
    pixels = torch.where(flipped, pixels.flip(-1), pixels)
    images = (pixels - 127.5) / 127.5
    return images, labels


net = FaceNet()
model = prepare(net)
trained = [p for p in net.backbone.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(
    [
        {"params": trained, "weight_decay": 5e-4},
        {"params": net.head.parameters(), "weight_decay": 5e-3},
    ],
    lr=LR,
    momentum=0.9,
)
total_step, warmup_step = 20, 4
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: (
        (step + 1) / warmup_step
        if step < warmup_step
        else ((total_step - step) / (total_step - warmup_step)) ** 2
    ),
)
for parts in batches(faces):
    for images, labels in parts:
        with autocast():
            logits = model(images, labels)
        loss = F.cross_entropy(logits.float(), labels)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.backbone.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()
