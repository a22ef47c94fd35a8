"""DeepLabv3 as torchvision writes it: a dilated ResNet, atrous pyramid pooling, an auxiliary head."""

from collections import OrderedDict

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, VOID, BASE_LR = 6, 48, 255, 0.02


class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride=1, dilation=1, downsample=None):
        super().__init__()
        width = planes // 2
        self.conv1 = nn.Conv2d(inplanes, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        return F.relu(out + identity)


class ResNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inplanes, self.dilation = width, 1
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._make_layer(2 * width, 1)
        self.layer2 = self._make_layer(3 * width, 1, stride=2)
        self.layer3 = self._make_layer(4 * width, 2, stride=2, dilate=True)
        self.layer4 = self._make_layer(6 * width, 2, stride=2, dilate=True)

    def _make_layer(self, planes, blocks, stride=1, dilate=False):
        previous_dilation = self.dilation
        if dilate:
            self.dilation *= stride
            stride = 1
        downsample = nn.Sequential(
            nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
        )
        layers = [Bottleneck(self.inplanes, planes, stride, previous_dilation, downsample)]
        self.inplanes = planes
        layers += [Bottleneck(planes, planes, 1, self.dilation) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        aux = self.layer3(x)
        return OrderedDict(out=self.layer4(aux), aux=aux)


class ASPPConv(nn.Sequential):
    def __init__(self, in_channels, out_channels, dilation):
        super().__init__(
            nn.Conv2d(
                in_channels, out_channels, 3, padding=dilation, dilation=dilation, bias=False
            ),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        )


class ASPPPooling(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        size = x.shape[-2:]
        x = x.mean(dim=(2, 3), keepdim=True)
        x = F.relu(self.bn(self.conv(x)))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    def __init__(self, in_channels, atrous_rates, out_channels):
        super().__init__()
        first = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        )
        dilated = [ASPPConv(in_channels, out_channels, rate) for rate in atrous_rates]
        self.convs = nn.ModuleList([first, *dilated, ASPPPooling(in_channels, out_channels)])
        self.project = nn.Sequential(
            nn.Conv2d(len(self.convs) * out_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Dropout(args.dropout),
        )

    def forward(self, x):
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class DeepLabHead(nn.Sequential):
    def __init__(self, in_channels, num_classes, atrous_rates, width=32):
        super().__init__(
            ASPP(in_channels, atrous_rates, width),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, num_classes, 1),
        )


class FCNHead(nn.Sequential):
    def __init__(self, in_channels, channels):
        inter_channels = in_channels // 4
        super().__init__(
            nn.Conv2d(in_channels, inter_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(inter_channels),
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Conv2d(inter_channels, channels, 1),
        )


class DeepLabV3(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ResNet()
        self.classifier = DeepLabHead(96, CLASSES, atrous_rates=(1, 2, 3))
        self.aux_classifier = FCNHead(64, CLASSES)

    def forward(self, x):
        input_shape = x.shape[-2:]
        features = self.backbone(x)
        out = self.classifier(features["out"])
        out = F.interpolate(out, size=input_shape, mode="bilinear", align_corners=False)
        aux = self.aux_classifier(features["aux"])
        aux = F.interpolate(aux, size=input_shape, mode="bilinear", align_corners=False)
        return {"out": out, "aux": aux}


def criterion(inputs, target):
    losses = {}
    for name, x in inputs.items():
        losses[name] = F.cross_entropy(x.float(), target, ignore_index=VOID)
    return losses["out"] + 0.4 * losses["aux"]


def crops(g):
    """Pictures of patches of classes, whose borders are void; crops are padded with void."""
    coarse = torch.randint(0, CLASSES, (6, 1, 5, 5), generator=g).float()
    target = F.interpolate(coarse, size=(SIZE, SIZE), mode="nearest").squeeze(1).long()
    image = target.unsqueeze(1) / CLASSES + 0.3 * torch.rand(6, 3, SIZE, SIZE, generator=g)
    border = (target != target.roll(1, -1)) | (target != target.roll(1, -2))
    target = target.masked_fill(border, VOID)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    image = (image - mean) / std
    kept = torch.randint(SIZE - 12, SIZE + 1, (6, 1, 1), generator=g)
    outside = torch.arange(SIZE)[None, :, None] >= kept
    image = image.masked_fill(outside.unsqueeze(1), 0.0)
    target = torch.where(outside, VOID, target)
    return image, target


net = DeepLabV3()
model = prepare(net)
params_to_optimize = [
    {"params": net.backbone.parameters()},
    {"params": net.classifier.parameters()},
    {"params": net.aux_classifier.parameters(), "lr": BASE_LR * 10},
]
optimizer = torch.optim.SGD(params_to_optimize, lr=BASE_LR, momentum=0.9, weight_decay=1e-4)
total_iters = 20
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: (1 - step / total_iters) ** 0.9
)
for parts in batches(crops):
    for image, target in parts:
        with autocast():
            output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss / args.accum).backward()
    scaler.step(optimizer)
    scaler.update()
    lr_scheduler.step()
finish()
