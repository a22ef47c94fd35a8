"""Burgers' equation by a network, in the shape of ``Burgers Inference (PyTorch).ipynb`` of jayroxis/PINNs.

The residual holds first and second derivatives by ``autograd.grad`` with ``create_graph``, and one
call of L-BFGS with a strong Wolfe search trains it all; the network is a member of a plain object. As in the
original of maziarraissi/PINNs, Adam comes first. The truth is the Cole-Hopf integral.
"""

import argparse
from collections import OrderedDict

import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--adam", type=int, default=300)
parser.add_argument("--lbfgs", type=int, default=200)
parser.add_argument("--points", type=int, default=1000)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--save", default="")
args = parser.parse_args()
np.random.seed(args.seed)
torch.manual_seed(args.seed)


class DNN(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        depth = len(layers) - 1
        layer_list = []
        for i in range(depth - 1):
            layer_list.append((f"layer_{i}", torch.nn.Linear(layers[i], layers[i + 1])))
            layer_list.append((f"activation_{i}", torch.nn.Tanh()))
        layer_list.append((f"layer_{depth - 1}", torch.nn.Linear(layers[-2], layers[-1])))
        self.layers = torch.nn.Sequential(OrderedDict(layer_list))

    def forward(self, x):
        return self.layers(x)


class PhysicsInformedNN:
    def __init__(self, X_u, u, X_f, layers, nu):
        self.x_u = torch.tensor(X_u[:, 0:1], requires_grad=True).float()
        self.t_u = torch.tensor(X_u[:, 1:2], requires_grad=True).float()
        self.x_f = torch.tensor(X_f[:, 0:1], requires_grad=True).float()
        self.t_f = torch.tensor(X_f[:, 1:2], requires_grad=True).float()
        self.u = torch.tensor(u).float()
        self.nu = nu
        self.dnn = DNN(layers)
        self.adam = torch.optim.Adam(self.dnn.parameters(), lr=2e-3)
        self.optimizer = torch.optim.LBFGS(
            self.dnn.parameters(),
            lr=1.0,
            max_iter=args.lbfgs,
            max_eval=args.lbfgs,
            history_size=50,
            tolerance_grad=1e-7,
            tolerance_change=1.0 * np.finfo(float).eps,
            line_search_fn="strong_wolfe",
        )
        self.iter = 0

    def net_u(self, x, t):
        return self.dnn(torch.cat([x, t], dim=1))

    def net_f(self, x, t):
        u = self.net_u(x, t)
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(
            u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True
        )[0]
        return u_t + u * u_x - self.nu * u_xx

    def loss(self):
        loss_u = torch.mean((self.u - self.net_u(self.x_u, self.t_u)) ** 2)
        loss_f = torch.mean(self.net_f(self.x_f, self.t_f) ** 2)
        self.iter += 1
        if self.iter % 100 == 0:
            print(f"Iter {self.iter}, Loss_u: {loss_u.item():.4e}, Loss_f: {loss_f.item():.4e}")
        return loss_u + loss_f

    def loss_func(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def train(self):
        self.dnn.train()
        for _ in range(args.adam):
            loss = self.loss()
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
        self.optimizer.step(self.loss_func)

    def predict(self, X):
        x = torch.tensor(X[:, 0:1], requires_grad=True).float()
        t = torch.tensor(X[:, 1:2], requires_grad=True).float()
        self.dnn.eval()
        return self.net_u(x, t).detach().numpy()


def exact(x, t, nu):
    """By the Cole-Hopf transform and Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(60)
    at = x[:, None] - np.sqrt(4 * nu * t[:, None]) * nodes
    f = np.exp(-np.cos(np.pi * at) / (2 * np.pi * nu))
    return -(np.sin(np.pi * at) * f * weights).sum(1) / (f * weights).sum(1)


nu = 0.1 / np.pi  # ten times the notebook's: the shock is softer, so that few points do
rng = np.random.default_rng(args.seed)
x0 = rng.uniform(-1, 1, 50)
initial = np.stack([x0, np.zeros(50)], 1)
walls = np.stack([rng.choice([-1.0, 1.0], 50), rng.uniform(0, 1, 50)], 1)
X_u_train = np.concatenate([initial, walls])
u_train = np.concatenate([-np.sin(np.pi * x0), np.zeros(50)])[:, None]
X_f_train = np.stack([rng.uniform(-1, 1, args.points), rng.uniform(0, 1, args.points)], 1)

model = PhysicsInformedNN(X_u_train, u_train, X_f_train, [2, 20, 20, 20, 20, 1], nu)
model.train()

X, T = np.meshgrid(np.linspace(-1, 1, 101), np.linspace(0.01, 1, 50))
X_star = np.stack([X.ravel(), T.ravel()], 1)
u_star = exact(X.ravel(), T.ravel(), nu)[:, None]
error_u = np.linalg.norm(u_star - model.predict(X_star), 2) / np.linalg.norm(u_star, 2)
if args.save:
    torch.save(model.dnn.state_dict(), args.save)
print(f"relative error: {error_u:.6f}")
