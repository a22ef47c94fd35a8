"""Soft actor-critic on a pendulum, as ``cleanrl/sac_continuous_action.py`` of vwxyzjn/cleanrl does.

Five networks, of which two are targets that follow by ``param.data.copy_``; three optimizers, one of
them over a lone tensor (``log_alpha``); a replay buffer; the actor steps every second time, twice.
"""

import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=1100)
parser.add_argument("--gamma", type=float, default=0.97)
parser.add_argument("--tau", type=float, default=0.02)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--learning-starts", type=int, default=200)
parser.add_argument("--policy-lr", type=float, default=2e-3)
parser.add_argument("--q-lr", type=float, default=2e-3)
parser.add_argument("--policy-frequency", type=int, default=2)
parser.add_argument("--save", default="")

LOG_STD_MAX, LOG_STD_MIN = 2, -5


class Pendulum:
    """A pendulum that starts anywhere and is to be held upright by a limited torque."""

    def __init__(self, rng):
        self.rng = rng
        self.theta = self.omega = 0.0
        self.t = 0

    def reset(self):
        self.theta, self.omega = self.rng.uniform(-np.pi, np.pi), self.rng.uniform(-1, 1)
        self.t = 0
        return self.observe()

    def observe(self):
        return np.array([np.cos(self.theta), np.sin(self.theta), self.omega], dtype=np.float32)

    def step(self, action):
        torque = float(np.clip(action[0], -2, 2))
        angle = (self.theta + np.pi) % (2 * np.pi) - np.pi
        reward = -(angle**2 + 0.1 * self.omega**2 + 0.001 * torque**2)
        self.omega += (15 * np.sin(self.theta) + 3 * torque) * 0.05
        self.omega = float(np.clip(self.omega, -8, 8))
        self.theta += self.omega * 0.05
        self.t += 1
        return self.observe(), reward, self.t >= 100


class ReplayBuffer:
    def __init__(self, size, rng):
        self.rng = rng
        self.obs = np.zeros((size, 3), np.float32)
        self.next_obs = np.zeros((size, 3), np.float32)
        self.actions = np.zeros((size, 1), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.pos = 0

    def add(self, obs, next_obs, action, reward):
        self.obs[self.pos], self.next_obs[self.pos] = obs, next_obs
        self.actions[self.pos], self.rewards[self.pos] = action, reward
        self.pos += 1

    def sample(self, n):
        i = self.rng.integers(0, self.pos, n)
        arrays = (self.obs[i], self.next_obs[i], self.actions[i], self.rewards[i])
        return [torch.from_numpy(a) for a in arrays]


class SoftQNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc_mean = nn.Linear(64, 1)
        self.fc_logstd = nn.Linear(64, 1)
        self.register_buffer("action_scale", torch.tensor([2.0]))
        self.register_buffer("action_bias", torch.tensor([0.0]))

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        mean = self.fc_mean(x)
        log_std = torch.tanh(self.fc_logstd(x))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        return mean, log_std

    def get_action(self, x):
        mean, log_std = self(x)
        std = log_std.exp()
        normal = torch.distributions.Normal(mean, std)
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t)
        log_prob -= torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        log_prob = log_prob.sum(1, keepdim=True)
        mean = torch.tanh(mean) * self.action_scale + self.action_bias
        return action, log_prob, mean


if __name__ == "__main__":
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    env = Pendulum(np.random.default_rng(args.seed))
    actor = Actor()
    qf1, qf2 = SoftQNetwork(), SoftQNetwork()
    qf1_target, qf2_target = SoftQNetwork(), SoftQNetwork()
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=args.q_lr)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=args.policy_lr)

    target_entropy = -1.0
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    a_optimizer = optim.Adam([log_alpha], lr=args.q_lr)

    rb = ReplayBuffer(args.total_timesteps, np.random.default_rng(args.seed))
    obs = env.reset()
    for global_step in range(args.total_timesteps):
        if global_step < args.learning_starts:
            action = np.random.uniform(-2, 2, 1)
        else:
            action, _, _ = actor.get_action(torch.tensor(obs)[None])
            action = action.detach().numpy()[0]
        next_obs, reward, truncated = env.step(action)
        rb.add(obs, next_obs, action, reward)
        obs = env.reset() if truncated else next_obs

        if global_step > args.learning_starts:
            observations, next_observations, actions, rewards = rb.sample(args.batch_size)
            with torch.no_grad():
                next_actions, next_log_pi, _ = actor.get_action(next_observations)
                qf1_next = qf1_target(next_observations, next_actions)
                qf2_next = qf2_target(next_observations, next_actions)
                min_qf_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
                next_q_value = rewards + args.gamma * min_qf_next.view(-1)

            qf1_loss = F.mse_loss(qf1(observations, actions).view(-1), next_q_value)
            qf2_loss = F.mse_loss(qf2(observations, actions).view(-1), next_q_value)
            qf_loss = qf1_loss + qf2_loss
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()

            if global_step % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    pi, log_pi, _ = actor.get_action(observations)
                    min_qf_pi = torch.min(qf1(observations, pi), qf2(observations, pi))
                    actor_loss = ((alpha * log_pi) - min_qf_pi).mean()
                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()

                    with torch.no_grad():
                        _, log_pi, _ = actor.get_action(observations)
                    alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
                    a_optimizer.zero_grad()
                    alpha_loss.backward()
                    a_optimizer.step()
                    alpha = log_alpha.exp().item()

            for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
                target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
            for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
                target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)

            if global_step % 500 == 0:
                print(f"step={global_step} qf_loss={qf_loss.item():.3f} alpha={alpha:.3f}")

    returns = []
    env = Pendulum(np.random.default_rng(0))
    for _ in range(10):
        obs, total, over = env.reset(), 0.0, False
        while not over:
            with torch.no_grad():
                _, _, action = actor.get_action(torch.tensor(obs)[None])
            obs, reward, over = env.step(action.numpy()[0])
            total += reward
        returns.append(total)
    if args.save:
        torch.save([m.state_dict() for m in (actor, qf1, qf2, qf1_target, qf2_target)], args.save)
    print(f"episodic return: {np.mean(returns):.6f}")
