"""All chapters, in the order of the table, with the behaviours of ``scripted.tsv``."""

from functools import partial

from conformance.behaviours import (
    casts,
    checkpoints,
    forward,
    loops,
    loss_scale,
    scalers,
    steppers,
    weights,
)
from conformance.models import INF, NAN, ONE, Weighted, poisoned, values
from conformance.outcomes import table
from conformance.subjects.protocol import Scale, Subject

MODULES = (loss_scale, scalers, loops, steppers, forward, weights, checkpoints, casts)
CHAPTERS = tuple(module.CHAPTER for module in MODULES)

GRADIENTS = dict(zip(".0xn-fhqi", (1.0, 0.0, INF, NAN, -INF, 1.0, 0.5, 0.25, INF), strict=True))
"""Events that begin with a forward and a backward pass: what its gradients are."""
TAKEN = {".": True, "0": True, "x": False, "n": False, "-": False, "s": True, "S": False}
"""Events that end with a step: whether it is taken."""
OTHERS = {
    "p": lambda training: training.forward(ONE),
    "c": lambda training: training.clip(1.0),
    "z": lambda training: training.optimizer.zero_grad(),
    "Z": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "m": lambda training: training.model.zero_grad(),
}


def play(row: dict[str, str], subject: Subject) -> None:
    """The events of a row, and the scales after its steps and the weights at its end.

    After a bar a training of new objects goes on from the state of the one before it.
    """
    scale, scales, state = Scale(**eval(f"dict({row['scale']})")), [], None
    for events in row["events"].split("|"):
        with subject.training(Weighted(), scale=scale) as training:
            if state is not None:
                training.load(state)
            for event in events:
                if event in GRADIENTS:
                    output = training.forward(ONE)
                    training.backward(poisoned(output, GRADIENTS[event]).sum())
                if event in TAKEN:
                    assert training.step() == TAKEN[event]
                    scales.append(training.scale)
                if event in OTHERS:
                    OTHERS[event](training)
            state, found = training.state(), values(training.weights())
    assert not row["scales"] or scales == [float(x) for x in row["scales"].split()]
    assert not row["weights"] or found == [float(x) for x in row["weights"].split()]


for row in table("scripted"):
    peers = {"Lightning": row["lightning"]} if row["lightning"] else None
    chapter = {module.__name__.rpartition(".")[2]: module.CHAPTER for module in MODULES}
    check = partial(play, row)
    chapter[row["chapter"]].add(row["behaviour"], row["source"], check, instead=peers)
