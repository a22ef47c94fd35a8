"""``if __name__ == "__main__"`` and a DataLoader whose workers are spawned, so import this file."""

import sys

import torch
from script_end import report, seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Sines of two frequencies."""

    def __len__(self):
        return 128

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        phase = torch.rand(1, generator=generator) * 6
        return torch.sin(torch.arange(16) * (0.4 + 0.4 * (i % 2)) + phase), i % 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(1, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, waves):
        _, last = self.body(waves.unsqueeze(-1))
        return self.head(last[0])


def main():
    torch.manual_seed(seed())
    method = sys.argv[2] if len(sys.argv) > 2 else "fork"
    workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    loader = DataLoader(Waves(), 32, shuffle=True, **workers)
    classifier = Classifier()
    optimizer = torch.optim.RMSprop(classifier.parameters(), lr=0.01)
    for _ in range(10):
        total = 0.0
        for waves, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(classifier(waves), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
    report(classifier, total)


if __name__ == "__main__":
    main()
