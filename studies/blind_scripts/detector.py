"""FCOS as torchvision writes it: frozen batch norm, feature pyramid, focal, GIoU and centre-ness losses."""

import math

import torch.nn.functional as F
from common import autocast, batches, dist, finish, nn, prepare, scaler, torch, world

CLASSES, SIZE, BOXES = 5, 64, 3
STRIDES = (4, 8, 16)
RANGES = ((-1, 16), (16, 32), (32, 1000))


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.rand(num_features) + 0.5)
        self.register_buffer("bias", torch.randn(num_features) * 0.1)
        self.register_buffer("running_mean", torch.randn(num_features) * 0.1)
        self.register_buffer("running_var", torch.rand(num_features) + 0.5)

    def forward(self, x):
        w = self.weight.reshape(1, -1, 1, 1)
        b = self.bias.reshape(1, -1, 1, 1)
        rv = self.running_var.reshape(1, -1, 1, 1)
        rm = self.running_mean.reshape(1, -1, 1, 1)
        scale = w * (rv + self.eps).rsqrt()
        bias = b - rm * scale
        return x * scale + bias


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = FrozenBatchNorm2d(planes)
        self.downsample = nn.Sequential(
            nn.Conv2d(inplanes, planes, 1, stride, bias=False), FrozenBatchNorm2d(planes)
        )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class Backbone(nn.Module):
    def __init__(self, widths=(24, 32, 48)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(16)
        self.layer1 = BasicBlock(16, widths[0], 2)
        self.layer2 = BasicBlock(widths[0], widths[1], 2)
        self.layer3 = BasicBlock(widths[1], widths[2], 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        c2 = self.layer1(x)
        c3 = self.layer2(c2)
        return [c2, c3, self.layer3(c3)]


class FeaturePyramidNetwork(nn.Module):
    def __init__(self, widths, out_channels):
        super().__init__()
        self.inner_blocks = nn.ModuleList(nn.Conv2d(w, out_channels, 1) for w in widths)
        self.layer_blocks = nn.ModuleList(
            nn.Conv2d(out_channels, out_channels, 3, padding=1) for _ in widths
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                nn.init.constant_(module.bias, 0)

    def forward(self, x):
        last_inner = self.inner_blocks[-1](x[-1])
        results = [self.layer_blocks[-1](last_inner)]
        for idx in range(len(x) - 2, -1, -1):
            inner_lateral = self.inner_blocks[idx](x[idx])
            inner_top_down = F.interpolate(last_inner, size=inner_lateral.shape[-2:])
            last_inner = inner_lateral + inner_top_down
            results.insert(0, self.layer_blocks[idx](last_inner))
        return results


def tower(channels, depth=2):
    layers = []
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, 1, 1), nn.GroupNorm(8, channels), nn.ReLU()]
    return nn.Sequential(*layers)


class FCOSHead(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.cls_tower = tower(channels)
        self.box_tower = tower(channels)
        self.cls_logits = nn.Conv2d(channels, CLASSES, 3, 1, 1)
        self.bbox_reg = nn.Conv2d(channels, 4, 3, 1, 1)
        self.bbox_ctrness = nn.Conv2d(channels, 1, 3, 1, 1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))
        for layer in [*self.cls_tower, *self.box_tower, self.bbox_reg, self.bbox_ctrness]:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.05)
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.cls_logits.weight, std=0.05)
        nn.init.constant_(self.cls_logits.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, features):
        logits, boxes, ctrness = [], [], []
        for level, feature in enumerate(features):
            logits.append(self.cls_logits(self.cls_tower(feature)).flatten(2).transpose(1, 2))
            box_tower = self.box_tower(feature)
            box = self.bbox_reg(box_tower) * self.scales[level]
            boxes.append(F.relu(box + 1).flatten(2).transpose(1, 2) * STRIDES[level])
            ctrness.append(self.bbox_ctrness(box_tower).flatten(1))
        return torch.cat(logits, 1), torch.cat(boxes, 1), torch.cat(ctrness, 1)


class FCOS(nn.Module):
    def __init__(self, widths=(24, 32, 48), channels=32):
        super().__init__()
        self.backbone = Backbone(widths)
        self.fpn = FeaturePyramidNetwork(widths, channels)
        self.head = FCOSHead(channels)

    def forward(self, images):
        return self.head(self.fpn(self.backbone(images)))


def locations():
    points, lower, upper = [], [], []
    for stride, (low, high) in zip(STRIDES, RANGES, strict=True):
        shift = torch.arange(0, SIZE, stride) + stride // 2
        y, x = torch.meshgrid(shift, shift, indexing="ij")
        points.append(torch.stack([x.flatten(), y.flatten()], 1))
        lower.append(torch.full((x.numel(),), low))
        upper.append(torch.full((x.numel(),), high))
    return torch.cat(points).float(), torch.cat(lower), torch.cat(upper)


def assign(boxes, labels):
    """Each point's class (CLASSES is background) and distances to its smallest box."""
    points, lower, upper = locations()
    left_top = points[None, :, None] - boxes[:, None, :, :2]
    right_bottom = boxes[:, None, :, 2:] - points[None, :, None]
    ltrb = torch.cat([left_top, right_bottom], -1)
    inside = ltrb.amin(-1) > 0
    largest = ltrb.amax(-1)
    level = (largest >= lower[None, :, None]) & (largest < upper[None, :, None])
    areas = ((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))[:, None]
    areas = areas.expand(-1, len(points), -1).masked_fill(~(inside & level), float("inf"))
    area, chosen = areas.min(-1)
    target = ltrb.gather(2, chosen[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
    classes = labels.gather(1, chosen)
    classes = torch.where(area.isinf(), CLASSES, classes)
    return classes, target


def sigmoid_focal_loss(inputs, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(inputs)
    ce_loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = ce_loss * ((1 - p_t) ** gamma)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    return (alpha_t * loss).sum()


def giou_loss(predicted, target, weight, eps=1e-7):
    pred_area = (predicted[:, 0] + predicted[:, 2]) * (predicted[:, 1] + predicted[:, 3])
    target_area = (target[:, 0] + target[:, 2]) * (target[:, 1] + target[:, 3])
    smallest = torch.minimum(predicted, target)
    inter = (smallest[:, 0] + smallest[:, 2]) * (smallest[:, 1] + smallest[:, 3])
    union = pred_area + target_area - inter
    hull = torch.maximum(predicted, target)
    enclosing = (hull[:, 0] + hull[:, 2]) * (hull[:, 1] + hull[:, 3])
    giou = inter / (union + eps) - (enclosing - union) / (enclosing + eps)
    return ((1 - giou) * weight).sum()


def centerness(target):
    left_right, top_bottom = target[:, [0, 2]], target[:, [1, 3]]
    ratio = (left_right.amin(1) / left_right.amax(1)) * (top_bottom.amin(1) / top_bottom.amax(1))
    return ratio.sqrt()


def compute_loss(outputs, classes, target, num_pos, sum_ctr):
    logits, boxes, ctrness = (output.float() for output in outputs)
    foreground = classes < CLASSES
    one_hot = F.one_hot(classes, CLASSES + 1)[..., :CLASSES].float()
    loss_cls = sigmoid_focal_loss(logits, one_hot) / num_pos
    weight = centerness(target[foreground])
    loss_reg = giou_loss(boxes[foreground], target[foreground], weight) / sum_ctr
    loss_ctr = F.binary_cross_entropy_with_logits(ctrness[foreground], weight, reduction="sum")
    return loss_cls + loss_reg + loss_ctr / num_pos


def detection(g):
    images = torch.rand(8, 3, SIZE, SIZE, generator=g)
    images = (images - 0.45) / 0.225
    flip = torch.rand(8, generator=g) < 0.5
    corner = torch.rand(8, BOXES, 2, generator=g) * 36
    extent = torch.rand(8, BOXES, 2, generator=g) * 36 + 6
    boxes = torch.cat([corner, (corner + extent).clamp(max=SIZE)], -1)
    flipped = torch.stack(
        [SIZE - boxes[..., 2], boxes[..., 1], SIZE - boxes[..., 0], boxes[..., 3]], -1
    )
    boxes = torch.where(flip[:, None, None], flipped, boxes)
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    labels = torch.randint(0, CLASSES, (8, BOXES), generator=g)
    return images, boxes, labels


net = FCOS()
model = prepare(net, [net.backbone, net.fpn, net.head])
backbone, biases, others = [], [], []
for name, parameter in net.named_parameters():
    if name.startswith("backbone"):
        backbone.append(parameter)
    elif name.endswith("bias"):
        biases.append(parameter)
    else:
        others.append(parameter)
optimizer = torch.optim.SGD(
    [
        {"params": backbone, "lr": 0.001},
        {"params": biases, "lr": 0.02, "weight_decay": 0.0},
        {"params": others},
    ],
    lr=0.01,
    momentum=0.9,
    weight_decay=1e-3,
)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
for parts in batches(detection):
    assigned = [assign(boxes, labels) for _, boxes, labels in parts]
    counts = torch.zeros(2)
    for classes, target in assigned:
        foreground = classes < CLASSES
        counts += torch.stack([foreground.sum(), centerness(target[foreground]).sum()])
    if world > 1:
        dist.all_reduce(counts)
    num_pos, sum_ctr = (counts / world).clamp(min=1.0)
    for (images, _, _), (classes, target) in zip(parts, assigned, strict=True):
        with autocast():
            outputs = model(images)
        loss = compute_loss(outputs, classes, target, num_pos, sum_ctr)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    warmup.step()
finish()
