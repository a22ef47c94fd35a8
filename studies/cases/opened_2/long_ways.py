"""Trainings whose forward pass is a long way: powers, fixed points, many small steps, many layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.case import Case, Training
from cases.opened_2.shared import decay, draw


class Substitutions(nn.Module):
    """Probabilities of changes between four letters after a time, from rates of exchange."""

    FREQUENCIES = (0.3, 0.2, 0.2, 0.3)

    def __init__(self) -> None:
        super().__init__()
        self.log_rates = nn.Parameter(torch.zeros(6))

    def forward(self, times_: Tensor) -> Tensor:
        """(n, 4, 4) for times (n,), by twelve squarings."""
        step = torch.eye(4) + rate_matrix(self.log_rates) * times_[:, None, None] / 2**12
        for _ in range(12):
            step = step @ step
        return step


def rate_matrix(log_rates: Tensor) -> Tensor:
    """Rates between letters, zero in sum over a row."""
    frequencies = torch.tensor(Substitutions.FREQUENCIES, dtype=log_rates.dtype)
    i, j = torch.triu_indices(4, 4, 1)
    between = torch.zeros(4, 4, dtype=log_rates.dtype).index_put((i, j), log_rates.exp())
    rates = (between + between.T) * frequencies
    return rates - torch.diag(rates.sum(-1))


def letters_of_genomes(seed: int) -> Training:
    """A biologist's: rates of substitution from pairs of genomes of known age."""
    torch.manual_seed(seed)
    model = Substitutions()
    g = draw(seed)
    true = 0.7 * torch.randn(6, generator=g)
    ages = 0.05 + 0.8 * torch.rand(12, generator=g)
    seen = torch.linalg.matrix_exp(rate_matrix(true.double()) * ages[:, None, None]).float()
    weight = seen * torch.tensor(Substitutions.FREQUENCIES)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        return -(weight * torch.log(model(ages) + 1e-9)).sum((1, 2)).mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.log_rates - true).abs().mean()),
        schedule=decay(optimizer, 200),
    )


class BusEngines(nn.Module):
    """Keep or replace an engine: the value of each mileage is a fixed point, carried along."""

    BINS, DISCOUNT = 25, 0.999

    def __init__(self) -> None:
        super().__init__()
        self.replacement, self.upkeep = (
            nn.Parameter(torch.tensor(3.0)),
            nn.Parameter(torch.tensor(0.5)),
        )
        drive = torch.zeros(self.BINS, self.BINS)
        for i in range(self.BINS):
            for more, chance in enumerate((0.35, 0.6, 0.05)):
                drive[i, min(i + more, self.BINS - 1)] += chance
        self.register_buffer("drive", drive)
        self.register_buffer("value", torch.zeros(self.BINS, 1))
        with torch.no_grad():
            for _ in range(300):
                self()

    def forward(self) -> Tensor:
        """By how much keeping is better than replacing, at each mileage."""
        keep = -self.upkeep * torch.linspace(0, 2.4, self.BINS)[:, None]
        value = self.value
        for _ in range(15):
            later = self.DISCOUNT * (self.drive @ value)
            kept, replaced = keep + later, later[0] - self.replacement
            value = torch.logaddexp(kept, replaced.expand_as(kept))
        self.value.copy_(value.detach())
        return (kept - replaced).squeeze(-1)


def engines_of_buses(seed: int) -> Training:
    """An economist's: costs of a garage by when it replaces engines; a fixed point within the loss."""
    torch.manual_seed(seed)
    truth = BusEngines()
    with torch.no_grad():
        truth.replacement.fill_(6.0)
        truth.upkeep.fill_(1.0)
        for _ in range(300):
            chance = torch.sigmoid(truth())
    many = torch.linspace(400, 40, BusEngines.BINS)
    kept = torch.binomial(many.round(), chance, generator=draw(seed)) / many.round()
    kept = 0.9 * chance + 0.1 * kept
    model = BusEngines()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(), kept, weight=many / many.mean())

    def evaluate() -> float:
        found = torch.stack([model.replacement / 6, model.upkeep])
        return float((found - 1).abs().mean())

    return Training(model, optimizer, loss, evaluate, schedule=decay(optimizer, 200))


class Filter(nn.Module):
    """How much light passes 25 layers of two materials, by the product of their matrices."""

    HIGH, LOW, GLASS = 2.3, 1.38, 1.52

    def __init__(self) -> None:
        super().__init__()
        mirror = [self.HIGH, self.LOW] * 6
        index = torch.tensor([*mirror, self.LOW, *mirror[::-1]])
        self.register_buffer("index", index)
        quarter = torch.ones(25)
        quarter[12] = 2.0
        self.register_buffer("design", quarter)
        self.off = nn.Parameter(torch.zeros(25))

    def forward(self, wave: Tensor) -> Tensor:
        """Transmission at wavelengths (n,), the design's being 1."""
        return passed(self.design * (1 + 1e-3 * self.off), self.index, wave)


def passed(thickness: Tensor, index: Tensor, wave: Tensor) -> Tensor:
    phase = torch.pi / 2 * thickness[:, None] / wave
    c, s, n = phase.cos(), phase.sin(), index[:, None]
    layers = torch.stack([c, -s / n, n * s, c], -1).unflatten(-1, (2, 2))
    whole = layers[0]
    for layer in layers[1:]:
        whole = torch.bmm(whole, layer)
    whole = whole.to(wave.dtype)
    (a, b), (d, e) = whole[:, 0].unbind(-1), whole[:, 1].unbind(-1)
    return 4 * Filter.GLASS / ((a + Filter.GLASS * e) ** 2 + (Filter.GLASS * b - d) ** 2)


def narrow_filter(seed: int) -> Training:
    """An optician's: which layers of a coating went wrong, by the line that it lets pass."""
    torch.manual_seed(seed)
    model = Filter()
    g = draw(seed)
    waves = torch.linspace(0.985, 1.015, 96)
    made = model.design * (1 + 1e-3 * torch.randn(25, generator=g))
    seen = passed(made.double(), model.index.double(), waves.double()).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)

    return Training(
        model,
        optimizer,
        lambda _: F.mse_loss(model(waves), seen),
        lambda: float(F.mse_loss(model(waves), seen).sqrt()),
        schedule=decay(optimizer, 250),
    )


class Compartments(nn.Module):
    """A drug in gut, blood, tissue and bone, minute by minute for three hours."""

    MINUTES = 180

    def __init__(self) -> None:
        super().__init__()
        self.log_rates = nn.Parameter(torch.full((6,), 4e-3).log())

    def forward(self, dose: Tensor) -> Tensor:
        """Amounts each half hour (n, 6, 4), from amounts (n, 4)."""
        return course(dose, self.log_rates)


def course(dose: Tensor, log_rates: Tensor) -> Tensor:
    taken, out, there, back, deep, up = log_rates.exp().unbind()
    o = torch.zeros_like(out)
    rows = [
        torch.stack([1 - taken, taken, o, o]),
        torch.stack([o, 1 - out - there, there, o]),
        torch.stack([o, back, 1 - back - deep, deep]),
        torch.stack([o, o, up, 1 - up]),
    ]
    minute, amount, seen = torch.stack(rows), dose, []
    for t in range(1, Compartments.MINUTES + 1):
        amount = amount @ minute
        if t % 30 == 0:
            seen.append(amount)
    return torch.stack(seen, 1)


def drug_in_the_body(seed: int) -> Training:
    """A pharmacologist's: rates of exchange between compartments from samples of animals."""
    torch.manual_seed(seed)
    model = Compartments()
    g = draw(seed)
    true = torch.tensor([2e-2, 4e-3, 8e-3, 3e-3, 1.2e-3, 5e-4]).log()
    true = true + 0.2 * torch.randn(6, generator=g)
    dose = torch.rand(60, 4, generator=g)
    dose[:, 2:] *= 0.5
    seen = course(dose.double(), true.double()).float()
    seen = seen * (1 + 2e-4 * torch.randn(seen.shape, generator=g))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(0, 60, (20,), generator=draw(seed, step + 1))
        return (torch.log(model(dose[rows])) - torch.log(seen[rows])).square().mean()

    return Training(
        model,
        optimizer,
        loss,
        lambda: float((model.log_rates - true).abs().mean()),
        schedule=decay(optimizer, 200),
    )


CASES = (
    Case("letters_of_genomes", "Powers.", 200, letters_of_genomes, "log error", False, 0.1),
    Case("engines_of_buses", "A fixed point.", 200, engines_of_buses, "error", False, 0.05),
    Case("narrow_filter", "Layers of a coating.", 250, narrow_filter, "error", False, 0.03),
    Case("drug_in_the_body", "Minutes.", 200, drug_in_the_body, "log error", False, 0.1),
)
