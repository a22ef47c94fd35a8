"""A compiled update with loss, backward and step in it, in the shape of ``dqn_torchcompile.py`` of pytorch-labs/LeanRL."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(args.seed)


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 3)
        )

    def forward(self, x):
        return self.network(x)


q_network, target_network = QNetwork(), QNetwork()
target_network.load_state_dict(q_network.state_dict())
optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
dynamics = torch.randn(3, 4, 4) / 4


def update(observations, actions, rewards, next_observations):
    with torch.no_grad():
        td_target = rewards + 0.9 * target_network(next_observations).max(dim=1)[0]
    old_val = q_network(observations).gather(1, actions.unsqueeze(-1)).squeeze()
    loss = F.mse_loss(td_target, old_val)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def policy(obs, epsilon):
    actions = torch.argmax(q_network(obs), dim=1)
    actions_random = torch.rand(actions.shape).mul(3).floor().to(torch.long)
    return torch.where(torch.rand(actions.shape).gt(epsilon), actions, actions_random)


update = torch.compile(update)
policy = torch.compile(policy, fullgraph=True)
obs = torch.randn(64, 4)
losses = []
for global_step in range(120):
    with torch.no_grad():
        actions = policy(obs, torch.tensor(max(0.1, 1 - global_step / 60)))
    next_obs = torch.tanh(
        torch.einsum("bij,bj->bi", dynamics[actions], obs) + 0.1 * torch.randn(64, 4)
    )
    losses.append(update(obs, actions, -next_obs.square().sum(1), next_obs))
    obs = torch.where(torch.rand(64, 1) < 0.1, torch.randn(64, 4), next_obs)
    if global_step % 30 == 0:
        target_network.load_state_dict(q_network.state_dict())
if args.save:
    torch.save(q_network.state_dict(), args.save)
print(f"td loss: {torch.stack(losses[-20:]).mean().item():.6f}")
