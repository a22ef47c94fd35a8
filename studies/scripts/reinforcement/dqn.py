"""A deep Q network on a pole that is to be balanced, in the shape of ``cleanrl/dqn.py`` of vwxyzjn/cleanrl.

A replay buffer, a target network that is copied now and then, exploration that fades, and a training
step in every few of the environment's.
"""

import argparse
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=8000)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--tau", type=float, default=1.0)
parser.add_argument("--target-network-frequency", type=int, default=140)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--start-e", type=float, default=1.0)
parser.add_argument("--end-e", type=float, default=0.05)
parser.add_argument("--exploration-fraction", type=float, default=0.3)
parser.add_argument("--learning-starts", type=int, default=1000)
parser.add_argument("--train-frequency", type=int, default=7)
parser.add_argument("--save", default="")


class CartPole:
    """A pole on a cart; an episode ends after 200 steps or with a fall."""

    def __init__(self, rng):
        self.rng, self.state, self.t = rng, None, 0

    def reset(self):
        self.state, self.t = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, v, theta, omega = self.state
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(theta), math.sin(theta)
        temp = (force + 0.05 * omega**2 * sin) / 1.1
        angular = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = temp - 0.05 * angular * cos / 1.1
        self.state = np.array(
            [x + 0.02 * v, v + 0.02 * linear, theta + 0.02 * omega, omega + 0.02 * angular]
        )
        self.t += 1
        terminated = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180
        return self.state.astype(np.float32), 1.0, terminated, self.t >= 200


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
        )

    def forward(self, x):
        return self.network(x)


def linear_schedule(start_e, end_e, duration, t):
    slope = (end_e - start_e) / duration
    return max(slope * t + start_e, end_e)


def play(env, q_network, episodes):
    lengths = []
    for _ in range(episodes):
        obs, over = env.reset(), False
        while not over:
            with torch.no_grad():
                action = q_network(torch.from_numpy(obs)[None]).argmax(1).item()
            obs, _, terminated, truncated = env.step(action)
            over = terminated or truncated
        lengths.append(env.t)
    return np.mean(lengths)


if __name__ == "__main__":
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    env = CartPole(np.random.default_rng(args.seed))
    q_network = QNetwork()
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = QNetwork()
    target_network.load_state_dict(q_network.state_dict())
    n = args.total_timesteps
    buffer = (
        np.zeros((n, 4), np.float32),
        np.zeros((n, 4), np.float32),
        np.zeros((n, 1), np.int64),
        np.zeros(n, np.float32),
        np.zeros(n, np.float32),
    )

    obs = env.reset()
    for global_step in range(args.total_timesteps):
        epsilon = linear_schedule(
            args.start_e, args.end_e, args.exploration_fraction * n, global_step
        )
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            q_values = q_network(torch.from_numpy(obs)[None])
            action = torch.argmax(q_values, dim=1).item()

        next_obs, reward, terminated, truncated = env.step(action)
        for column, value in zip(buffer, (obs, next_obs, action, reward, terminated)):
            column[global_step] = value
        obs = env.reset() if terminated or truncated else next_obs

        if global_step > args.learning_starts:
            if global_step % args.train_frequency == 0:
                index = np.random.randint(0, global_step, args.batch_size)
                observations, next_observations, actions, rewards, dones = (
                    torch.from_numpy(column[index]) for column in buffer
                )
                with torch.no_grad():
                    target_max, _ = target_network(next_observations).max(dim=1)
                    td_target = rewards + args.gamma * target_max * (1 - dones)
                old_val = q_network(observations).gather(1, actions).squeeze()
                loss = F.mse_loss(td_target, old_val)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if global_step % args.target_network_frequency == 0:
                for target_param, param in zip(target_network.parameters(), q_network.parameters()):
                    target_param.data.copy_(
                        args.tau * param.data + (1.0 - args.tau) * target_param.data
                    )
        if global_step % 2000 == 1999:
            print(f"step={global_step} td_loss={loss.item():.4f} q={old_val.mean().item():.2f}")

    if args.save:
        torch.save(q_network.state_dict(), args.save)
    length = play(CartPole(np.random.default_rng(0)), q_network, 10)
    print(f"episode length: {length:.6f}")
