"""SimCLR, in the shape of ``simclr.py`` of sthalles/SimCLR.

Two views of each image go through the encoder as one batch; InfoNCE over the normalised features at a
temperature of 0.07. The repository's autocast and GradScaler are switched by ``--fp16-precision``,
which is off, as it is there: the scaler is there and does nothing.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("-b", "--batch-size", type=int, default=96)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fp16-precision", action="store_true")
parser.add_argument("--out_dim", type=int, default=32)
parser.add_argument("--temperature", type=float, default=0.07)
parser.add_argument("--log-every-n-steps", type=int, default=20)
parser.add_argument("--save", default="")


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out_dim))

    def forward(self, x):
        return self.fc(self.backbone(x))


def augment(images):
    """Shift, rescale the contrast, and add noise."""
    padded = F.pad(images, (1, 1, 1, 1))
    i, j = torch.randint(0, 3, (2,)).tolist()
    shifted = padded[:, :, i : i + 8, j : j + 8]
    contrast = torch.empty(len(images), 1, 1, 1).uniform_(0.6, 1.4)
    return shifted * contrast + 0.1 * torch.randn_like(images)


class SimCLR:
    def __init__(self, model, optimizer, scheduler, args):
        self.args = args
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.criterion = torch.nn.CrossEntropyLoss()

    def info_nce_loss(self, features):
        labels = torch.cat([torch.arange(self.args.batch_size) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)

        # discard the main diagonal from both: labels and similarities matrix
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)

        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        return logits / self.args.temperature, labels

    def train(self, train_loader):
        scaler = GradScaler("cpu", enabled=self.args.fp16_precision)
        n_iter = 0
        for epoch_counter in range(self.args.epochs):
            for (images,) in train_loader:
                images = torch.cat([augment(images), augment(images)], dim=0)
                with autocast("cpu", torch.float16, enabled=self.args.fp16_precision):
                    features = self.model(images)
                    logits, labels = self.info_nce_loss(features)
                    loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
                if n_iter % self.args.log_every_n_steps == 0:
                    top1 = (logits.argmax(1) == 0).float().mean().item()
                    print(f"{epoch_counter} loss {loss.item():.4f} top1 {top1:.3f}")
                n_iter += 1
            if epoch_counter >= 1:  # warmup for the first epoch
                self.scheduler.step()


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    train_loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images[:1200]),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    model = ResNetSimCLR(args.out_dim)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train_loader))
    SimCLR(model, optimizer, scheduler, args).train(train_loader)

    model.eval()
    with torch.no_grad():
        features = model.backbone(images).numpy()
    probe = LogisticRegression(max_iter=2000).fit(features[:300], digits.target[:300])
    if args.save:
        torch.save(
            {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save
        )
    print(f"accuracy: {probe.score(features[1200:], digits.target[1200:]):.6f}")


if __name__ == "__main__":
    main()
