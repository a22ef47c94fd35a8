"""What a mismatch of trainer and rollout does to a policy gradient, and what takes it away.

::

    python studies/policy_gradient.py [--seeds 3] [--steps 200]

A small transformer learns by REINFORCE to write a sequence that follows a rule. The rollout samples
with a copy of the FP32 weights: in FP32, in BF16, in BF16 with FP32 where ``mpdiag.mismatch`` says so,
in FP16, and with weights in FP8. The trainer takes the samples as its own, as trainers do that correct
nothing. Printed are the mean and the largest difference of the log-probabilities in the last quarter of
the steps, the cosine between this gradient and that of the same samples weighted by the ratio of both
policies (what an unbiased trainer computes), and the reward of the trained FP32 policy.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from forward_mismatch import in_fp32
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mpdiag

WORDS, LENGTH, ROWS = 32, 16, 64
WAYS = ("fp32", "bf16", "bf16-keep", "fp16", "fp8")


def policy(seed: int) -> nn.Module:
    """A small Llama."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=2, **sizes)).eval()


def rollout_of(model: nn.Module, way: str, keep: Sequence[str]) -> nn.Module:
    """The model that samples, with the trainer's weights of this moment."""
    if way == "fp32":
        return model
    if way == "fp16":
        return copy.deepcopy(model).half()
    narrow = copy.deepcopy(model).bfloat16()
    if way == "fp8":
        for module in narrow.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = mpdiag.fake_quantize(module.weight.data, "fp8_e4m3")
    return in_fp32(narrow, model, keep, "lm_head") if way == "bf16-keep" else narrow


def sampled(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Sequences of the model, ``(rows, length)``, after a first word by chance."""
    words = torch.randint(0, WORDS, (ROWS, 1), generator=generator)
    with torch.no_grad():
        for _ in range(LENGTH - 1):
            chances = model(input_ids=words).logits[:, -1].float().softmax(-1)
            words = torch.cat([words, torch.multinomial(chances, 1, generator=generator)], 1)
    return words


def log_probabilities(model: nn.Module, words: Tensor) -> Tensor:
    """Of each word but the first."""
    logits = model(input_ids=words).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, words[:, 1:, None])[..., 0]


def rewards(words: Tensor) -> Tensor:
    """The share of words that follow the rule."""
    return (words[:, 1:] == (words[:, :-1] * 3 + 7) % WORDS).float().mean(1)


def gradient(model: nn.Module, words: Tensor, weights: Tensor) -> list[Tensor]:
    """Of REINFORCE with the batch's mean as its baseline."""
    gained = rewards(words)
    advantage = (gained - gained.mean()) / (gained.std() + 1e-3)
    loss = -(weights * log_probabilities(model, words).sum(1) * advantage).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def train(way: str, seed: int, steps: int) -> dict[str, Any]:
    """One training, and what was seen in its last quarter."""
    model, keep = policy(seed), ()
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    seen: list[tuple[float, float, float]] = []
    for step in range(steps):
        if way == "bf16-keep" and step in (0, steps // 2):
            tokens = {"input_ids": sampled(model, torch.Generator().manual_seed(step))}
            narrow = rollout_of(model, "bf16", ())
            keep = mpdiag.mismatch(model, narrow, tokens, budget=0.2, probes=4).keep
        rollout = rollout_of(model, way, keep)
        words = sampled(rollout, generator)
        used = gradient(model, words, torch.ones(ROWS))
        if step >= steps * 3 // 4:
            with torch.no_grad():
                apart = log_probabilities(model, words) - log_probabilities(rollout, words)
            true = gradient(model, words, apart.sum(1).exp())
            a, b = (torch.cat([g.flatten() for g in gs]) for gs in (used, true))
            cosine = float(torch.cosine_similarity(a, b, dim=0))
            seen.append((float(apart.abs().mean()), float(apart.abs().max()), cosine))
        for p, g in zip(model.parameters(), used, strict=True):
            p.grad = g
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    mean, largest, cosine = zip(*seen, strict=True)
    final = [float(rewards(sampled(model, generator)).mean()) for _ in range(4)]
    return {
        "way": way,
        "seed": seed,
        "mean": sum(mean) / len(mean),
        "max": max(largest),
        "1 - cosine": 1 - sum(cosine) / len(cosine),
        "reward": sum(final) / len(final),
        "keep": keep,
    }


def main() -> None:
    """Print a line of JSON for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for way in WAYS:
            print(json.dumps(train(way, seed, options.steps)), flush=True)


if __name__ == "__main__":
    main()
