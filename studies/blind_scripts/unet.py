"""A U-Net that segments images: batch norm, skips with padding, cross-entropy plus Dice, RMSprop."""

import torch.nn.functional as F
from common import args, autocast, batches, finish, nn, prepare, scaler, torch

CLASSES = 4


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x):
        return self.conv(self.pool(x))


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, bilinear):
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.reduce = nn.Conv2d(in_channels, in_channels // 2, 1)
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, 2, stride=2)
            self.reduce = nn.Identity()
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.reduce(self.up(x1))
        diffY = x2.size()[2] - x1.size()[2]
        diffX = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diffX // 2, diffX - diffX // 2, diffY // 2, diffY - diffY // 2])
        x = torch.cat([x2, x1], dim=1)
        return self.conv(x)


class OutConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, channels=3, classes=CLASSES, width=12):
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = Down(width, 2 * width)
        self.down2 = Down(2 * width, 4 * width)
        self.down3 = Down(4 * width, 8 * width)
        self.up1 = Up(8 * width, 4 * width, bilinear=False)
        self.up2 = Up(4 * width, 2 * width, bilinear=True)
        self.up3 = Up(2 * width, width, bilinear=True)
        self.outc = OutConv(width, classes)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x = self.up1(x4, x3)
        x = self.up2(x, x2)
        x = self.up3(x, x1)
        return self.outc(x)


def dice_coeff(probs, target, epsilon=1.0):
    dims = (-1, -2)
    inter = 2 * (probs * target).sum(dim=dims)
    sets_sum = probs.sum(dim=dims) + target.sum(dim=dims)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(logits, masks):
    probs = F.softmax(logits.float(), dim=1)
    target = F.one_hot(masks, CLASSES).permute(0, 3, 1, 2).float()
    return 1 - dice_coeff(probs[:, 1:], target[:, 1:])


def augment(images, masks, flip):
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    masks = torch.where(flip[:, None, None], masks.flip(-1), masks)
    return images, masks


def load(g):
    images = torch.randn(8, 3, 36, 44, generator=g)
    smooth = F.avg_pool2d(images, 5, stride=1, padding=2)
    masks = smooth.argmax(1) + (smooth[:, 0] > 0.2)
    return augment(images, masks, torch.rand(8, generator=g) < 0.5)


model = prepare(UNet())
optimizer = torch.optim.RMSprop(
    model.parameters(), lr=1e-3, alpha=0.99, weight_decay=1e-8, momentum=0.9, foreach=True
)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.0, 1.5]))
model.train()
for parts in batches(load):
    optimizer.zero_grad(set_to_none=True)
    for images, true_masks in parts:
        with autocast():
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            loss = loss + dice_loss(masks_pred, true_masks)
        scaler.scale(loss / args.accum).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
finish()
