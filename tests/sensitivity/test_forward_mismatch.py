"""Two forward passes: how far they are apart, which layer adds it, what FP32 takes away."""

import copy
import json
import math

import calls
import pytest
import torch
from schemas import assert_described
from torch import nn
from torch.nn import functional as F

import mpdiag
from mpdiag.errors import InputError, UsageError
from mpdiag.reports.text.mismatch import mismatch_text

WORDS, WIDTH = 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, past=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(parts, 1) for parts in zip(*past, strict=True))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=len(past or "1") == 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, past=None):
        x = x + self.attention(self.norm(x), past=past)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, attention_mask=None, labels=None, pasts=(None, None)):
        x = self.embed(input_ids)
        for block, past in zip(self.blocks, pasts, strict=True):
            x = block(x, past=past)
        return {"logits": self.head(x)}


def decoded(model, batch):
    pasts, ids = ([], []), batch["input_ids"]
    steps = [model(ids[:, i : i + 1], pasts=pasts)["logits"] for i in range(ids.shape[1])]
    return torch.cat(steps, 1)


def row_by_row(model, batch):
    return torch.cat([model(row[None])["logits"] for row in batch["input_ids"]])


def batch(rows=6, length=10):
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(0, WORDS, (rows, length), generator=generator)}


def log_probabilities(logits, tokens):
    by_hand = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    return torch.stack(
        [by_hand[i, j, tokens[i, j + 1]] for i in range(len(tokens)) for j in range(9)]
    )


def test_the_distance_is_that_of_the_tokens():
    a, given = Model(), batch()
    b = copy.deepcopy(a).bfloat16()
    found = mpdiag.mismatch(a, b, given)
    with torch.no_grad():
        logits = [m(**given)["logits"].double() for m in (a, b)]
    of_a, of_b = (log_probabilities(x, given["input_ids"]) for x in logits)
    assert (found.tokens, found.unequal) == (54, ())
    assert found.distance.mean == pytest.approx(float((of_a - of_b).abs().mean()), rel=1e-9)
    assert found.distance.max == pytest.approx(float((of_a - of_b).abs().max()), rel=1e-9)
    p, q = (x[:, :-1].softmax(-1) for x in logits)
    assert found.distance.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-6)
    for real in (torch.arange(10) < 7, torch.arange(10) >= 3):  # padded right, left
        masked = {**given, "attention_mask": real.expand(6, 10)}
        assert mpdiag.mismatch(a, b, masked, probes=1).tokens == 36


@pytest.mark.parametrize("name", ["head", "blocks.0.up", "blocks.1.attention.qkv", "embed"])
def test_the_layer_that_alone_differs_adds_everything_and_fp32_removes_it(name):
    a = Model()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.get_submodule(name).weight.mul_(1.001)
    found = mpdiag.mismatch(a, b, batch(), budget=1.0)
    by_name = {layer.name: layer for layer in found.layers}
    assert by_name[name].added == pytest.approx(1.0, rel=0.02)
    assert by_name[name].removable == pytest.approx(1.0, rel=0.02)
    others = [x for x in found.layers if x.name != name]
    assert max(x.added for x in others) < 1e-3
    assert max(abs(x.removable or 0.0) for x in others) < 1e-3
    assert (found.keep, found.unequal) == ((name,), (f"{name}.weight",))
    assert found.kept.mean < 1e-3 * found.distance.mean


def test_a_module_that_owns_parameters_beside_modules_is_tried_as_a_whole():
    def model():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.Linear(WIDTH, WORDS))

    a = model()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[1].self_attn.in_proj_weight.mul_(1.01)
    found = mpdiag.mismatch(a, b, batch()["input_ids"], budget=1.0)
    best = found.ranking[0]
    assert (best.name, best.removable) == ("1.self_attn", pytest.approx(1.0, rel=0.05))
    assert found.kept.mean < 1e-3 * found.distance.mean


def test_what_a_module_computes_itself_is_charged_to_it():
    a = Model()
    b = copy.deepcopy(a)
    b.blocks[1].forward = lambda x, past=None: 1.001 * Block.forward(b.blocks[1], x, past)
    found = mpdiag.mismatch(a, b, batch())
    worst = max(found.layers, key=lambda layer: layer.added)
    assert (worst.name, worst.removable, found.keep) == ("blocks.1", None, ())
    assert worst.added == pytest.approx(1.0, rel=0.02)
    assert worst.difference == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("forward", [decoded, row_by_row])
def test_passes_of_other_forms_are_put_together(forward):
    a = Model().bfloat16()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.blocks[1].down.weight.mul_(1.25)
    found = mpdiag.mismatch(a, (b, forward), batch())
    assert all(layer.difference is not None for layer in found.layers)
    assert max(found.layers, key=lambda layer: layer.added).name == "blocks.1.down"


def test_rows_of_other_lengths_without_padding_are_measured_without_layers():
    """Each row has another length: their outputs do not fit into those of the padded batch."""
    lengths, ids = (5, 3, 4), torch.randint(1, WORDS, (3, 5), generator=torch.manual_seed(0))
    given = {"labels": torch.stack([torch.where(torch.arange(5) < n, row, -100)
                                    for n, row in zip(lengths, ids, strict=True)])}  # fmt: skip

    def padded(model, _batch):
        return model(ids)["logits"]

    def unpadded(model, _batch):
        rows = [model(row[None, :n])["logits"] for n, row in zip(lengths, ids, strict=True)]
        return torch.cat([F.pad(r, (0, 0, 0, 5 - r.shape[1])) for r in rows])

    model = Model()
    found = mpdiag.mismatch((model, padded), (copy.deepcopy(model).bfloat16(), unpadded), given)
    assert found.distance.mean > 0
    assert found.ranking == []
    said = calls.printed(*mismatch_text(found))
    assert "no layer gave outputs of the same shapes in both passes" in " ".join(said.split())


def test_fp16_in_place_of_bf16_is_measured_and_nothing_changes(root, tmp_path):
    a = Model().train()
    recording, optimizer = tmp_path / "run", torch.optim.SGD(a.parameters(), 0.1)
    with mpdiag.record(a, optimizer, recording, operations=0):
        F.cross_entropy(
            a(**batch())["logits"].flatten(0, 1), batch()["input_ids"].flatten()
        ).backward()
        optimizer.step()
    a.zero_grad()
    b = copy.deepcopy(a).bfloat16()
    before = copy.deepcopy(a.state_dict())
    with pytest.raises(InputError, match="digits records another model"):
        mpdiag.mismatch(a, b, batch(), recording=root / "sample_runs" / "digits")
    found = mpdiag.mismatch(a, b, batch(rows=32), budget=0.3, recording=recording)
    assert found.loss_scale == mpdiag.analyze(recording).plan.loss_scale.init_scale
    assert found.fp16.mean < found.distance.mean / 3
    assert found.keep[0] == "head"
    assert found.kept.mean < found.distance.mean
    assert a.training
    assert a.head.weight.grad is None
    assert not a.head._forward_hooks
    assert not a.head._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in a.state_dict().items())
    a.head.weight.data[0, 0] = b.head.weight.data[0, 0] = 1e9
    assert "overflow" in mpdiag.mismatch(a, b, batch(), probes=1).fp16_reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, b: (a, 3, batch()), "two models, or pairs"),
        (lambda a, b: (a, (b, lambda m, x: "no"), batch()), "returns no logits"),
        (lambda a, b: (a, (b, lambda m, x: m(**x)["logits"][:1]), batch()), r"\[1, 10, 16\]"),
        (lambda a, b: ((a, torch.no_grad()(row_by_row)), b, batch()), "without gradients"),
        (lambda a, b: (a, b, {"ids": 1}), r"a forward pass failed \(TypeError: .*'ids'"),
        (lambda a, b: (a, b, {**batch(), "labels": batch()["input_ids"] * 0 - 100}), "no token"),
        (lambda a, b: (a, _infinite(b), batch()), "find_nonfinite"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(change, words):
    """So is an option that makes no sense, whatever the models."""
    with pytest.raises(UsageError, match="budget must be a share from 0 to 1"):
        mpdiag.mismatch(Model(), Model(), batch(), budget=float("nan"))
    with pytest.raises(UsageError, match="probes must be 1 or more, not 0"):
        mpdiag.mismatch(Model(), Model(), batch(), probes=0)
    with pytest.raises(UsageError, match=words):
        mpdiag.mismatch(*change(Model(), Model()), probes=1)


def _infinite(model):
    model.head.bias.data[0] = math.inf
    return model


INPUTS = """
import sys, copy, torch
from torch import nn

def mismatch_inputs():
    print("mine", sys.argv[1])
    torch.manual_seed(0)
    a = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    return a, copy.deepcopy(a).bfloat16(), torch.randint(0, 9, (2, 6))

if __name__ == "__main__":
    raise SystemExit("trained")
"""


def test_the_command_takes_what_a_script_defines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs.py").write_text(INPUTS)
    (tmp_path / "none.py").write_text("x = 1")
    done = calls.run("mismatch", "--budget", "0.5", "--", "inputs.py", "word")
    assert done.exit_code == 0, done.output
    assert "The log-probabilities of 10 tokens differ by" in done.stdout
    assert "Keep 1 in FP32. Measured: " in done.stdout
    assert "mine" not in done.stdout
    document = json.loads(calls.run("mismatch", "--json", "--", "inputs.py", "word").stdout)
    assert_described("mismatch", document)
    assert [layer["name"] for layer in document["layers"]] == ["", "0", "1", "2"]
    done = calls.run("mismatch", "--", "none.py")
    assert (done.exit_code, "mismatch_inputs" in done.output) == (2, True)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no weights')")
    done = calls.run("mismatch", "--", "broken.py")
    assert (done.exit_code, "RuntimeError: no weights" in done.stderr) == (1, True)
    assert "mpdiag" not in done.stderr
