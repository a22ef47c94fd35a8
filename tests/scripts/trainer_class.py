"""A Trainer class with everything in ``self``: warm-up, an average of weights, evaluation between."""

import copy

import torch
from script_end import report, seed
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return {"logits": self.head(self.features(x).mean((2, 3)))}


class Trainer:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.images = torch.rand(192, 1, 12, 12) * 0.3
        self.labels = torch.arange(192) % 3
        for i, label in enumerate(self.labels):  # a bright corner, a bright stripe, or nothing
            if label:
                self.images[i, 0, :3, : 3 if label == 1 else 12] += 0.7
        self.model = Net()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / 5)
        )

    def fit(self, epochs):
        for _ in range(epochs):
            self.train_epoch()
            self.evaluate()

    def train_epoch(self):
        self.model.train()
        for rows in torch.randperm(192).split(32):
            output = self.model(self.images[rows])
            loss = nn.functional.cross_entropy(output["logits"], self.labels[rows])
            self.optimizer.zero_grad(set_to_none=False)
            loss.backward()
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            with torch.no_grad():
                for mean, now in zip(self.average.parameters(), self.model.parameters()):
                    mean.lerp_(now, 0.2)

    @torch.no_grad()
    def evaluate(self):
        self.average.eval()
        logits = self.average(self.images)["logits"]
        assert logits.dtype == torch.float32
        return nn.functional.cross_entropy(logits, self.labels).item()


if __name__ == "__main__":
    trainer = Trainer(seed())
    trainer.fit(8)
    report(trainer.average, trainer.evaluate())
