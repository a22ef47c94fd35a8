"""PPO as CleanRL writes it: a convolutional actor-critic, GAE, clipped losses, two epochs a rollout."""

from copy import deepcopy

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world
from torch.distributions import Categorical

ENVS, STEPS, ACTIONS, SIZE = 8, 12, 6, 20
GAMMA, GAE_LAMBDA, CLIP, ENT_COEF, VF_COEF, MAX_GRAD_NORM = 0.99, 0.95, 0.1, 0.01, 0.5, 0.5


def layer_init(layer, std=2.0**0.5, bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Torso(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(4, 16, 4, stride=2))
        self.conv2 = layer_init(nn.Conv2d(16, 32, 3, stride=2))
        self.conv3 = layer_init(nn.Conv2d(32, 32, 3, stride=1))
        self.fc = layer_init(nn.Linear(32 * 2 * 2, hidden))

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return F.relu(self.fc(x.flatten(1)))


class Head(nn.Module):
    def __init__(self, hidden, out, std):
        super().__init__()
        self.hidden = layer_init(nn.Linear(hidden, hidden))
        self.out = layer_init(nn.Linear(hidden, out), std=std)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


class Agent(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.network = Torso(hidden)
        self.actor = Head(hidden, ACTIONS, std=0.01)
        self.critic = Head(hidden, 1, std=1.0)

    def forward(self, x):
        hidden = self.network(x / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def gae(rewards, values, dones, next_value, next_done):
    """Advantages of [environments, time]; dones[t] says that an episode ended before t."""
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(next_value)
    for t in reversed(range(STEPS)):
        if t == STEPS - 1:
            nextnonterminal = 1.0 - next_done
            nextvalues = next_value
        else:
            nextnonterminal = 1.0 - dones[:, t + 1]
            nextvalues = values[:, t + 1]
        delta = rewards[:, t] + GAMMA * nextvalues * nextnonterminal - values[:, t]
        lastgaelam = delta + GAMMA * GAE_LAMBDA * nextnonterminal * lastgaelam
        advantages[:, t] = lastgaelam
    return advantages


def normalized(parts):
    """Advantages of the whole batch, on all ranks, with mean 0 and deviation 1."""
    every = torch.cat([part.flatten() for part in parts])
    sums = torch.stack([every.sum(), torch.tensor(float(every.numel()))])
    if world > 1:
        dist.all_reduce(sums)
    mean = sums[0] / sums[1]
    squares = (every - mean).square().sum()
    if world > 1:
        dist.all_reduce(squares)
    std = (squares / (sums[1] - 1)).sqrt()
    return [(part - mean) / (std + 1e-8) for part in parts]


def rollout(g):
    """What the environments said: frames, actions, rewards, and where episodes ended."""
    obs = torch.randint(0, 256, (ENVS, STEPS + 1, 4, SIZE, SIZE), generator=g).float()
    actions = torch.randint(0, ACTIONS, (ENVS, STEPS), generator=g)
    rewards = torch.randint(-1, 2, (ENVS, STEPS), generator=g).float()
    dones = (torch.rand(ENVS, STEPS + 1, generator=g) < 0.15).float()
    return obs, actions, rewards, dones


def drifted(agent):
    """The agent that acted, some updates before."""
    g = torch.Generator().manual_seed(7)
    other = deepcopy(agent).requires_grad_(False)
    for parameter in other.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=g), alpha=0.01)
    return other


def act(obs, actions, rewards, dones):
    """The acting agent's log-probabilities and values, and the advantages."""
    with torch.no_grad():
        logits, values = behaviour(obs.flatten(0, 1))
        logits = logits.view(len(obs), STEPS + 1, ACTIONS)[:, :-1]
        values = values.view(len(obs), STEPS + 1)
        logprobs = Categorical(logits=logits).log_prob(actions)
        advantages = gae(rewards, values[:, :-1], dones[:, :-1], values[:, -1], dones[:, -1])
    return logprobs, values[:, :-1], advantages


agent = Agent()
behaviour = drifted(agent)
model = prepare(agent, [agent.network])
optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
for iteration, parts in enumerate(batches(rollout)):
    frac = 1.0 - iteration / 10
    optimizer.param_groups[0]["lr"] = frac * 2.5e-4
    acted = [act(*part) for part in parts]
    all_advantages = normalized([advantages for _, _, advantages in acted])
    for _ in range(2):
        optimizer.zero_grad()
        for (obs, actions, _, _), (logprobs, values, raw_advantages), advantages in zip(
            parts, acted, all_advantages, strict=True
        ):
            returns = (raw_advantages + values).flatten()
            advantages, values = advantages.flatten(), values.flatten()
            with autocast():
                logits, newvalue = model(obs[:, :-1].flatten(0, 1))
            logits, newvalue = logits.float(), newvalue.float()
            probs = Categorical(logits=logits)
            newlogprob, entropy = probs.log_prob(actions.flatten()), probs.entropy()
            logratio = newlogprob - logprobs.flatten()
            ratio = logratio.exp()
            pg_loss1 = -advantages * ratio
            pg_loss2 = -advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            v_loss_unclipped = (newvalue - returns) ** 2
            v_clipped = values + torch.clamp(newvalue - values, -CLIP, CLIP)
            v_loss_clipped = (v_clipped - returns) ** 2
            v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
            entropy_loss = entropy.mean()
            loss = pg_loss - ENT_COEF * entropy_loss + v_loss * VF_COEF
            scaler.scale(loss / args.accum).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
finish()
