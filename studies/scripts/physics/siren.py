"""A picture from its gradients alone, in the shape of ``experiment_scripts/train_poisson_grad_img.py`` of vsitzmann/siren.

A network of sines with a frequency of 30, whose input gradient is fitted to the picture's, so that the
loss differentiates a derivative. The picture is a part of a photograph of scikit-learn's.
"""

import argparse
import math

import torch
from sklearn.datasets import load_sample_image
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--num_epochs", type=int, default=250)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--side", type=int, default=32)
parser.add_argument("--hidden_features", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)


class SineLayer(nn.Module):
    def __init__(self, in_features, out_features, is_first=False, omega_0=30):
        super().__init__()
        self.omega_0 = omega_0
        self.linear = nn.Linear(in_features, out_features)
        with torch.no_grad():
            bound = 1 / in_features if is_first else math.sqrt(6 / in_features) / omega_0
            self.linear.weight.uniform_(-bound, bound)

    def forward(self, input):
        return torch.sin(self.omega_0 * self.linear(input))


class Siren(nn.Module):
    def __init__(self, in_features, hidden_features, hidden_layers, out_features):
        super().__init__()
        net = [SineLayer(in_features, hidden_features, is_first=True)]
        net += [SineLayer(hidden_features, hidden_features) for _ in range(hidden_layers)]
        final_linear = nn.Linear(hidden_features, out_features)
        with torch.no_grad():
            bound = math.sqrt(6 / hidden_features) / 30
            final_linear.weight.uniform_(-bound, bound)
        self.net = nn.Sequential(*net, final_linear)

    def forward(self, model_input):
        # allows to take derivative w.r.t. input
        coords = model_input["coords"].clone().detach().requires_grad_(True)
        return {"model_in": coords, "model_out": self.net(coords)}


def gradient(y, x):
    return torch.autograd.grad(y, [x], grad_outputs=torch.ones_like(y), create_graph=True)[0]


def gradients_mse(model_output, gt):
    gradients = gradient(model_output["model_out"], model_output["model_in"])
    return {"gradients_loss": torch.mean((gradients - gt["gradients"]).pow(2).sum(-1))}


side = args.side
picture = (
    torch.tensor(load_sample_image("china.jpg")).float().mean(-1)[100:356, 200:456] / 127.5 - 1
)
picture = nn.functional.adaptive_avg_pool2d(picture[None], side)[0]
axis = torch.linspace(-1, 1, side)
grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
rows, columns = torch.gradient(picture, spacing=2 / (side - 1))
truth = {"gradients": torch.stack([rows, columns], -1).view(-1, 2)}

model = Siren(2, args.hidden_features, 3, 1)
optim = torch.optim.Adam(lr=args.lr, params=model.parameters())
for epoch in range(args.num_epochs):
    model_output = model({"coords": grid})
    losses = gradients_mse(model_output, truth)
    train_loss = 0.0
    for loss_name, loss in losses.items():
        train_loss += loss.mean()
    optim.zero_grad()
    train_loss.backward()
    optim.step()
    if epoch % 50 == 0:
        print(f"Epoch {epoch}, Total loss {train_loss.item():.6f}")

with torch.no_grad():  # the gradients leave the mean open
    found = model({"coords": grid})["model_out"].view(side, side)
    error = (found - found.mean()) - (picture - picture.mean())
    psnr = 10 * torch.log10(4 / error.square().mean())
if args.save:
    torch.save(model.state_dict(), args.save)
print(f"psnr: {psnr.item():.6f}")
