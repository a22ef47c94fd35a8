"""Super-resolution, in the shape of ``super_resolution/main.py`` of pytorch/examples.

Convolutions at the low resolution and a pixel shuffle; a mean squared error; the model itself is saved,
not its state. The pictures are patches of scikit-learn's photographs.
"""

import argparse
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="PyTorch Super Res Example")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nEpochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--seed", type=int, default=123)
parser.add_argument("--save", default="")
opt = parser.parse_args()

torch.manual_seed(opt.seed)


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 24, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(24, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))

    def _initialize_weights(self):
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


def patches():
    found = []
    for image in load_sample_images().images:
        grey = torch.tensor(image).float().mean(-1)[:416, :640] / 255
        found.append(grey.unfold(0, 32, 32).unfold(1, 32, 32).reshape(-1, 1, 32, 32))
    target = torch.cat(found)
    input = nn.functional.interpolate(
        target, scale_factor=1 / opt.upscale_factor, mode="bicubic", antialias=True
    )
    test = torch.arange(len(target)) % 8 == 0
    return TensorDataset(input[~test], target[~test]), TensorDataset(input[test], target[test])


train_set, test_set = patches()
training_data_loader = DataLoader(train_set, batch_size=opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(test_set, batch_size=10, shuffle=False)
model = Net(upscale_factor=opt.upscale_factor)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for input, target in training_data_loader:
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader):.5f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for input, target in testing_data_loader:
            mse = criterion(model(input), target)
            avg_psnr += 10 * log10(1 / mse.item())
    return avg_psnr / len(testing_data_loader)


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
if opt.save:
    torch.save({"whole": model, "state": model.state_dict()}, opt.save)
print(f"psnr: {test():.6f}")
