"""A single-shot detector, in the shape of ``train.py`` and ``layers/modules/multibox_loss.py`` of amdegroot/ssd.pytorch.

Prior boxes matched by their overlap, hard negatives by two sorts, sums divided by the number of
matches, SGD with momentum and a rate that falls by steps. The scenes hold scikit-learn's digits.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--max_iter", type=int, default=260)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--gamma", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()

CLASSES, SIZE, VARIANCE = 4, 32, (0.1, 0.2)  # background, 0, 1, 2


def scene(rng, digits):
    """An image with one to three digits, and [x1, y1, x2, y2, label] of each, from 0 to 1."""
    image, boxes = 0.1 * rng.standard_normal((SIZE, SIZE)), []
    for _ in range(rng.integers(1, 4)):
        label = rng.integers(0, 3)
        side = rng.choice([8, 16])
        x, y = rng.integers(0, SIZE - side + 1, 2)
        if any(x < b[2] and b[0] < x + side and y < b[3] and b[1] < y + side for b in boxes):
            continue
        pixels = digits[label][rng.integers(len(digits[label]))] / 16
        image[y : y + side, x : x + side] += np.kron(pixels, np.ones((side // 8, side // 8)))
        boxes.append([x, y, x + side, y + side, label])
    boxes = np.array(boxes, dtype=np.float32) / [SIZE, SIZE, SIZE, SIZE, 1]
    return torch.tensor(image[None], dtype=torch.float32), torch.tensor(boxes, dtype=torch.float32)


def prior_boxes():
    """Centres and sizes: squares of 8 on a grid of 8 × 8, of 16 on one of 4 × 4."""
    priors = []
    for cells, size in ((8, 0.25), (4, 0.5)):
        for i in range(cells):
            for j in range(cells):
                priors.append([(j + 0.5) / cells, (i + 0.5) / cells, size, size])
    return torch.tensor(priors)


def point_form(boxes):
    return torch.cat((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), 1)


def jaccard(a, b):
    low = torch.max(a[:, None, :2], b[None, :, :2])
    high = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    return inter / (area_a[:, None] + area_b[None] - inter)


def match(threshold, truths, priors, labels):
    overlaps = jaccard(truths, point_form(priors))
    best_prior_idx = overlaps.argmax(1)
    best_truth_overlap, best_truth_idx = overlaps.max(0)
    best_truth_overlap.index_fill_(0, best_prior_idx, 2)  # ensure best prior
    for j in range(best_prior_idx.size(0)):
        best_truth_idx[best_prior_idx[j]] = j
    matches = truths[best_truth_idx]
    conf = labels[best_truth_idx].long() + 1
    conf[best_truth_overlap < threshold] = 0
    g_cxcy = (matches[:, :2] + matches[:, 2:]) / 2 - priors[:, :2]
    g_cxcy /= VARIANCE[0] * priors[:, 2:]
    g_wh = torch.log((matches[:, 2:] - matches[:, :2]) / priors[:, 2:]) / VARIANCE[1]
    return torch.cat([g_cxcy, g_wh], 1), conf


def decode(loc, priors):
    centres = priors[:, :2] + loc[:, :2] * VARIANCE[0] * priors[:, 2:]
    return point_form(torch.cat((centres, priors[:, 2:] * torch.exp(loc[:, 2:] * VARIANCE[1])), 1))


class L2Norm(nn.Module):
    def __init__(self, n_channels, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.full((n_channels,), float(scale)))

    def forward(self, x):
        norm = x.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-10
        return self.weight[None, :, None, None] * torch.div(x, norm)


class SSD(nn.Module):
    def __init__(self):
        super().__init__()

        def block(i, o, stride):
            return [nn.Conv2d(i, o, 3, stride, 1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

        self.base = nn.Sequential(*block(1, 16, 2), *block(16, 32, 1), *block(32, 32, 2))
        self.L2Norm = L2Norm(32, 10)
        self.extras = nn.Sequential(*block(32, 48, 2), *block(48, 48, 1))
        self.loc = nn.ModuleList([nn.Conv2d(32, 4, 3, padding=1), nn.Conv2d(48, 4, 3, padding=1)])
        self.conf = nn.ModuleList(
            [nn.Conv2d(32, CLASSES, 3, padding=1), nn.Conv2d(48, CLASSES, 3, padding=1)]
        )

    def forward(self, x):
        x = self.base(x)
        sources = [self.L2Norm(x), self.extras(x)]
        loc, conf = [], []
        for source, to_loc, to_conf in zip(sources, self.loc, self.conf):
            loc.append(to_loc(source).permute(0, 2, 3, 1).contiguous())
            conf.append(to_conf(source).permute(0, 2, 3, 1).contiguous())
        loc = torch.cat([o.view(o.size(0), -1) for o in loc], 1)
        conf = torch.cat([o.view(o.size(0), -1) for o in conf], 1)
        return loc.view(loc.size(0), -1, 4), conf.view(conf.size(0), -1, CLASSES)


class MultiBoxLoss(nn.Module):
    def __init__(self, overlap_thresh, neg_pos, priors):
        super().__init__()
        self.threshold, self.negpos_ratio, self.priors = overlap_thresh, neg_pos, priors

    def forward(self, predictions, targets):
        loc_data, conf_data = predictions
        num, num_priors = loc_data.size(0), self.priors.size(0)
        loc_t = torch.empty(num, num_priors, 4)
        conf_t = torch.empty(num, num_priors, dtype=torch.long)
        for idx in range(num):
            truths, labels = targets[idx][:, :-1], targets[idx][:, -1]
            loc_t[idx], conf_t[idx] = match(self.threshold, truths, self.priors, labels)

        pos = conf_t > 0
        pos_idx = pos.unsqueeze(pos.dim()).expand_as(loc_data)
        loss_l = F.smooth_l1_loss(
            loc_data[pos_idx].view(-1, 4), loc_t[pos_idx].view(-1, 4), reduction="sum"
        )

        # Compute max conf across batch for hard negative mining
        batch_conf = conf_data.view(-1, CLASSES)
        loss_c = torch.logsumexp(batch_conf, 1) - batch_conf.gather(1, conf_t.view(-1, 1))[:, 0]
        loss_c = loss_c.view(num, -1)
        loss_c[pos] = 0  # filter out pos boxes for now
        _, loss_idx = loss_c.sort(1, descending=True)
        _, idx_rank = loss_idx.sort(1)
        num_pos = pos.long().sum(1, keepdim=True)
        num_neg = torch.clamp(self.negpos_ratio * num_pos, max=pos.size(1) - 1)
        neg = idx_rank < num_neg.expand_as(idx_rank)

        chosen = pos | neg
        loss_c = F.cross_entropy(conf_data[chosen], conf_t[chosen], reduction="sum")
        N = num_pos.sum()
        return loss_l / N, loss_c / N


np.random.seed(args.seed)
torch.manual_seed(args.seed)
data = load_digits()
by_class = [data.images[data.target == c] for c in range(3)]
rng = np.random.default_rng(0)
train, test = [scene(rng, by_class) for _ in range(400)], [scene(rng, by_class) for _ in range(120)]
train, test = [s for s in train if len(s[1])], [s for s in test if len(s[1])]

priors = prior_boxes()
net = SSD()
optimizer = optim.SGD(
    net.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
)
criterion = MultiBoxLoss(0.5, 3, priors)
for iteration in range(args.max_iter):
    if iteration == int(0.8 * args.max_iter):
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.lr * args.gamma
    index = np.random.randint(0, len(train), args.batch_size)
    images, targets = torch.stack([train[i][0] for i in index]), [train[i][1] for i in index]
    out = net(images)
    optimizer.zero_grad()
    loss_l, loss_c = criterion(out, targets)
    loss = loss_l + loss_c
    loss.backward()
    optimizer.step()
    if iteration % 50 == 0:
        print(f"iter {iteration} || Loss: {loss.item():.4f} ||")

net.eval()
found = []
with torch.no_grad():
    loc, conf = net(torch.stack([image for image, _ in test]))
for i, (_, truth) in enumerate(test):  # share of the digits whose best box is right
    scores, boxes = conf[i].softmax(1), decode(loc[i], priors)
    for box in truth:
        score = scores[:, int(box[4]) + 1]
        overlap = jaccard(box[None, :4], boxes)[0]
        near = overlap > 0.5
        found.append(bool(near.any()) and score[near].max().item() > 0.5)
if args.save:
    torch.save(net.state_dict(), args.save)
print(f"recall: {np.mean(found):.6f}")
