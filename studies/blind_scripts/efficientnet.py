"""EfficientNet with group norms: squeeze and excitation, swish, drop connect, RMSprop."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES, SIZE, BATCH, GROUP_WIDTH, SMOOTHING = 12, 36, 12, 4, 0.1
WIDTH, DEPTH = 0.5, 1.2
STAGES = (  # expansion, channels, layers, kernel, stride
    (1, 16, 1, 3, 1),
    (6, 24, 1, 3, 2),
    (6, 40, 1, 5, 2),
    (4, 56, 1, 3, 1),
)


class SwishImplementation(torch.autograd.Function):
    """Keeps only its input for the backward pass."""

    @staticmethod
    def forward(ctx, i):
        ctx.save_for_backward(i)
        return i * torch.sigmoid(i)

    @staticmethod
    def backward(ctx, grad_output):
        (i,) = ctx.saved_tensors
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x):
        return SwishImplementation.apply(x)


def round_filters(filters):
    """Widths stay multiples of 8."""
    filters = filters * WIDTH
    new_filters = max(8, int(filters + 4) // 8 * 8)
    return new_filters + 8 if new_filters < 0.9 * filters else new_filters


def round_repeats(repeats):
    return math.ceil(DEPTH * repeats)


def group_norm(channels):
    return nn.GroupNorm(channels // GROUP_WIDTH, channels, eps=1e-3)


class Conv2dSamePadding(nn.Conv2d):
    """Pads as TensorFlow does: more at the end if the padding is odd."""

    def forward(self, x):
        pads = []
        for size, k, s in zip(x.shape[:1:-1], self.kernel_size, self.stride, strict=True):
            total = max((math.ceil(size / s) - 1) * s + k - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, groups=self.groups)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, kernel_size=1)
        self.swish = MemoryEfficientSwish()
        self.expand = nn.Conv2d(squeezed, channels, kernel_size=1)

    def forward(self, x):
        x_squeezed = F.adaptive_avg_pool2d(x, 1)
        x_squeezed = self.expand(self.swish(self.reduce(x_squeezed)))
        return torch.sigmoid(x_squeezed) * x


def drop_connect(inputs, p, training):
    """Whole rows of a batch skip the block."""
    if p == 0.0 or not training:
        return inputs
    keep_prob = 1 - p
    random_tensor = keep_prob + torch.rand([inputs.shape[0], 1, 1, 1])
    return inputs / keep_prob * torch.floor(random_tensor)


class MBConvBlock(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, inputs, outputs, expand_ratio, kernel_size, stride, drop_rate):
        super().__init__()
        self.expand_ratio, self.drop_rate = expand_ratio, drop_rate
        self.id_skip = stride == 1 and inputs == outputs
        oup = inputs * expand_ratio
        if expand_ratio != 1:
            self._expand_conv = Conv2dSamePadding(inputs, oup, kernel_size=1, bias=False)
            self._gn0 = group_norm(oup)
        self._depthwise_conv = Conv2dSamePadding(
            oup, oup, kernel_size=kernel_size, stride=stride, groups=oup, bias=False
        )
        self._gn1 = group_norm(oup)
        self._se = SqueezeExcitation(oup, max(1, inputs // 4))
        self._project_conv = Conv2dSamePadding(oup, outputs, kernel_size=1, bias=False)
        self._gn2 = group_norm(outputs)
        self._swish = MemoryEfficientSwish()

    def forward(self, inputs):
        x = inputs
        if self.expand_ratio != 1:
            x = self._swish(self._gn0(self._expand_conv(x)))
        x = self._swish(self._gn1(self._depthwise_conv(x)))
        x = self._se(x)
        x = self._gn2(self._project_conv(x))
        if self.id_skip:
            x = drop_connect(x, self.drop_rate, self.training) + inputs
        return x


class EfficientNet(nn.Module):
    def __init__(self, drop_rate):
        super().__init__()
        channels = round_filters(32)
        self._conv_stem = Conv2dSamePadding(3, channels, kernel_size=3, stride=2, bias=False)
        self._gn0 = group_norm(channels)
        self._blocks = nn.ModuleList()
        total = sum(round_repeats(layers) for _, _, layers, _, _ in STAGES)
        for expand_ratio, filters, layers, kernel_size, stride in STAGES:
            for i in range(round_repeats(layers)):
                rate = drop_rate * len(self._blocks) / total
                outputs, step = round_filters(filters), stride if i == 0 else 1
                self._blocks.append(
                    MBConvBlock(channels, outputs, expand_ratio, kernel_size, step, rate)
                )
                channels = outputs
        head = round_filters(160)
        self._conv_head = Conv2dSamePadding(channels, head, kernel_size=1, bias=False)
        self._gn1 = group_norm(head)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(drop_rate)
        self._fc = nn.Linear(head, CLASSES)
        self._swish = MemoryEfficientSwish()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.weight[:, 0].numel() // module.groups
                nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))

    def extract_features(self, inputs):
        x = self._swish(self._gn0(self._conv_stem(inputs)))
        for block in self._blocks:
            x = block(x)
        return self._swish(self._gn1(self._conv_head(x)))

    def forward(self, inputs):
        x = self._avg_pooling(self.extract_features(inputs))
        x = self._dropout(x.flatten(start_dim=1))
        return self._fc(x)


class LabelSmoothingLoss(nn.Module):
    def __init__(self, smoothing):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, target):
        logprobs = F.log_softmax(logits.float(), dim=-1)
        nll_loss = -logprobs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
        smooth_loss = -logprobs.mean(dim=-1)
        return ((1.0 - self.smoothing) * nll_loss + self.smoothing * smooth_loss).mean()


def gratings(g):
    """Stripes whose angle and frequency tell the class, tinted, shifted, flipped and normalized."""
    labels = torch.randint(0, CLASSES, (BATCH,), generator=g)
    angle, frequency = labels % 4 * math.pi / 4, 2.0 + labels // 4 * 2
    axis = torch.linspace(-1, 1, SIZE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    phase = torch.rand(BATCH, generator=g)[:, None, None] * 2 * math.pi
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    stripes = torch.sin(math.pi * frequency[:, None, None] * along + phase)
    tint = torch.rand(BATCH, 3, 1, 1, generator=g)
    pictures = 0.5 + 0.4 * tint * stripes[:, None]
    pictures = pictures + 0.1 * torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
    flipped = torch.rand(BATCH, 1, 1, 1, generator=g) < 0.5
    pictures = torch.where(flipped, pictures.flip(-1).flip(-2), pictures)
    return (pictures.clamp(0, 1) - 0.5) / 0.25, labels


net = EfficientNet(drop_rate=args.dropout)
model = prepare(net, net._blocks)
decayed = [p for p in net.parameters() if p.ndim > 1]
others = [p for p in net.parameters() if p.ndim <= 1]
optimizer = torch.optim.RMSprop(
    [{"params": decayed, "weight_decay": 1e-5}, {"params": others, "weight_decay": 0.0}],
    lr=4e-3,
    alpha=0.9,
    eps=1e-3,
    momentum=0.9,
)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
criterion = LabelSmoothingLoss(SMOOTHING)
for parts in batches(gratings):
    for images, labels in parts:
        with autocast():
            loss = criterion(model(images), labels) / args.accum
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    warmup.step()
    decay.step()
    optimizer.zero_grad()
finish()
