"""Meta-learning, in the shape of ``meta.py`` and ``learner.py`` of dragen1860/MAML-Pytorch.

Weights live in a ``ParameterList`` and are handed to ``functional`` calls; inner steps by
``autograd.grad`` make fast weights; the outer loss, a mean over tasks, is differentiated through them.
Tasks: tell four of the digits apart, turned and inverted at random, from two samples of each.
"""

import argparse
from copy import deepcopy

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epoch", type=int, default=150)
parser.add_argument("--n_way", type=int, default=4)
parser.add_argument("--k_spt", type=int, default=2)
parser.add_argument("--k_qry", type=int, default=8)
parser.add_argument("--task_num", type=int, default=4)
parser.add_argument("--meta_lr", type=float, default=4e-3)
parser.add_argument("--update_lr", type=float, default=0.4)
parser.add_argument("--update_step", type=int, default=3)
parser.add_argument("--seed", type=int, default=222)
parser.add_argument("--save", default="")
args = parser.parse_args()


class Learner(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.vars = nn.ParameterList()
        for fan_in, fan_out in zip(sizes, sizes[1:]):
            w = nn.Parameter(torch.ones(fan_out, fan_in))
            nn.init.kaiming_normal_(w)
            self.vars.append(w)
            self.vars.append(nn.Parameter(torch.zeros(fan_out)))

    def forward(self, x, vars=None):
        if vars is None:
            vars = self.vars
        for i in range(0, len(vars), 2):
            x = F.linear(x, vars[i], vars[i + 1])
            if i < len(vars) - 2:
                x = F.relu(x)
        return x

    def parameters(self, recurse=True):
        return self.vars


class Meta(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.update_lr, self.update_step = args.update_lr, args.update_step
        self.net = Learner([64, 48, 48, args.n_way])
        self.meta_optim = optim.Adam(self.net.parameters(), lr=args.meta_lr)

    def adapt(self, net, x_spt, y_spt, create_graph):
        fast_weights = list(net.parameters())
        for _ in range(self.update_step):
            loss = F.cross_entropy(net(x_spt, fast_weights), y_spt)
            grad = torch.autograd.grad(loss, fast_weights, create_graph=create_graph)
            fast_weights = [w - self.update_lr * g for g, w in zip(grad, fast_weights)]
        return fast_weights

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        losses_q, corrects = 0, 0
        for i in range(len(x_spt)):
            fast_weights = self.adapt(self.net, x_spt[i], y_spt[i], create_graph=True)
            logits_q = self.net(x_qry[i], fast_weights)
            losses_q += F.cross_entropy(logits_q, y_qry[i])
            with torch.no_grad():
                corrects += (F.softmax(logits_q, dim=1).argmax(dim=1) == y_qry[i]).sum().item()
        loss_q = losses_q / len(x_spt)
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        return corrects / y_qry.numel()

    def finetunning(self, x_spt, y_spt, x_qry, y_qry):
        net = deepcopy(self.net)
        fast_weights = self.adapt(net, x_spt, y_spt, create_graph=False)
        with torch.no_grad():
            logits_q = net(x_qry, fast_weights)
            return (logits_q.argmax(dim=1) == y_qry).double().mean().item()


digits = load_digits()
by_class = [digits.images[digits.target == c] / 8 - 1 for c in range(10)]


def task(rng):
    classes = rng.choice(10, args.n_way, replace=False)
    turn, sign = rng.integers(4), rng.choice([-1.0, 1.0])
    spt, qry = [], []
    for c in classes:
        chosen = by_class[c][rng.choice(len(by_class[c]), args.k_spt + args.k_qry, replace=False)]
        chosen = sign * np.rot90(chosen, turn, (1, 2)).reshape(-1, 64)
        spt.append(chosen[: args.k_spt])
        qry.append(chosen[args.k_spt :])
    y_spt = torch.arange(args.n_way).repeat_interleave(args.k_spt)
    y_qry = torch.arange(args.n_way).repeat_interleave(args.k_qry)
    x_spt, x_qry = (torch.tensor(np.concatenate(part), dtype=torch.float32) for part in (spt, qry))
    return x_spt, y_spt, x_qry, y_qry


torch.manual_seed(args.seed)
rng = np.random.default_rng(args.seed)
maml = Meta(args)
for step in range(args.epoch):
    batch = [task(rng) for _ in range(args.task_num)]
    accuracy = maml(*(torch.stack(part) for part in zip(*batch)))
    if step % 30 == 0:
        print(f"step: {step} \ttraining acc: {accuracy:.3f}")

rng = np.random.default_rng(0)
accuracies = [maml.finetunning(*task(rng)) for _ in range(100)]
if args.save:
    torch.save(maml.net.state_dict(), args.save)
print(f"accuracy: {np.mean(accuracies):.6f}")
