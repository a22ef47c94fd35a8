"""Loops that several tests record and train in this process, as ``mpdiag record`` and ``train`` do."""

import types
from contextlib import contextmanager

import torch
from torch import nn

from mpdiag.launching.recorded_script import Options, RecordingSettings, ScriptRecording
from mpdiag.launching.script_training import ScriptTraining, TrainScriptSettings


@contextmanager
def attached(watch):
    watch.attach()
    state = "failed"
    try:
        yield watch
        state = "complete"
    finally:
        watch.finish(state)


def recording(folder, **options):
    settings = RecordingSettings(folder, Options(**options), "script.py")
    return attached(ScriptRecording(settings))


def training(folder, plan):
    return attached(ScriptTraining(TrainScriptSettings(plan, folder, "emulated")))


def weights(made):
    return [p.detach().clone() for m in made.models.values() for p in m.parameters()]


def dcgan(turns=20):
    """The loop of PyTorch's DCGAN tutorial: the images outlive the discriminator's step."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    criterion = nn.BCEWithLogitsLoss()
    critic_steps = torch.optim.Adam(critic.parameters(), 2e-4)
    generator_steps = torch.optim.Adam(generator.parameters(), 2e-4)
    real, one, zero = torch.randn(16, 6), torch.ones(16, 1), torch.zeros(16, 1)
    printed = []
    for _ in range(turns):
        critic.zero_grad()
        on_real = criterion(critic(real), one)
        on_real.backward()
        fake = generator(torch.randn(16, 4))
        on_fake = criterion(critic(fake.detach()), zero)
        on_fake.backward()
        critic_steps.step()
        generator.zero_grad()
        fooled = criterion(critic(fake), one)
        fooled.backward()
        generator_steps.step()
        printed += [on_real.item() + on_fake.item(), fooled.item()]
    models = {"generator": generator, "critic": critic}
    return types.SimpleNamespace(models=models, printed=printed)


def soft_actor_critic(turns=20):
    """The three optimizers of SAC; the third steps one number that no module holds."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    log_alpha = torch.zeros(1, requires_grad=True)
    held = (critic.parameters(), actor.parameters(), [log_alpha])
    critic_steps, actor_steps, alpha_steps = (torch.optim.Adam(h, 1e-2) for h in held)
    for _ in range(turns):
        state, action, value = torch.randn(16, 4), torch.randn(16, 2), torch.randn(16, 1)
        critic_steps.zero_grad()
        nn.functional.mse_loss(critic(torch.cat([state, action], 1)), value).backward()
        critic_steps.step()
        chosen = actor(state)
        entropy = chosen.square().mean()
        actor_steps.zero_grad()
        reward = critic(torch.cat([state, chosen], 1)).mean()
        (log_alpha.exp().detach() * entropy - reward).backward()
        actor_steps.step()
        alpha_steps.zero_grad()
        (-(log_alpha.exp() * (entropy.detach() - 1.0))).sum().backward()
        alpha_steps.step()
    return types.SimpleNamespace(models={"actor": actor, "critic": critic}, log_alpha=log_alpha)
