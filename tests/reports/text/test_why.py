"""What ``mpdiag replay`` prints: its answer, then the steps in which something changes."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from mpdiag.analysis.scaling.replay import Replay
from mpdiag.reports.text.why import ENDS, replay_text


def played(scales, final, *, skipped=(), lost=0.0):
    n = len(scales)
    return Replay(
        steps=np.arange(n) * 10,
        scale=np.array(scales, float),
        absmax=np.ones(n),
        overflow=np.isin(np.arange(n), skipped),
        lost=np.broadcast_to(np.array(lost, float), (n,)),
        final_scale=float(final),
    )


def lines(replay):
    console = Console(file=io.StringIO(), width=100)
    console.print(replay_text(replay))
    return [line.strip() for line in console.file.getvalue().splitlines()]


def rows(found):
    return [line.split("│")[1].strip() for line in found if line.startswith("│")]


@pytest.mark.parametrize(
    ("replay", "answer", "listed"),
    [
        (
            played([8, 8, 8], 8),
            "The scaler skips 0 of 3 recorded steps. The loss scale stays at 8.",
            [],
        ),
        (
            played([32, 16, 8, 8], 8, skipped=[0, 1]),
            "The scaler skips 2 of 4 recorded steps. The loss scale begins at 32 and ends at 8.",
            ["0", "10", "20"],
        ),
        (  # a constant scale that always overflows
            played([64, 64], 64, skipped=[0, 1]),
            "The scaler skips 2 of 2 recorded steps. The loss scale stays at 64.",
            ["0", "10"],
        ),
        (  # it grows after the last recorded step
            played([8], 16),
            "The scaler skips 0 of 1 recorded step. The loss scale begins at 8 and ends at 16.",
            [],
        ),
    ],
)
def test_the_answer_comes_first_and_only_changes_are_listed(replay, answer, listed):
    found = lines(replay)
    assert found[0] == answer
    assert rows(found) == listed


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        (0.0, "FP16 loses none of the activation gradients."),
        (
            [0.1, 0.25, 0.2],
            "FP16 loses at most 25.00 % of a step's activation gradients (step 10).",
        ),
        ([0.0, 0.0, 1e-6], "FP16 loses under 0.01 % of a step's activation gradients (step 20)."),
        ([math.nan, 0.5, math.nan], "FP16 loses at most 50.00 % of a step's activation"),
        (math.nan, None),  # none were recorded
    ],
)
def test_what_is_lost_at_most_is_said_once(lost, sentence):
    found = lines(played([1, 1, 1], 1, lost=lost))
    assert len(found) == 1 + (sentence is not None)
    assert sentence is None or found[1].startswith(sentence)


def test_of_many_changes_both_ends_are_listed():
    found = lines(played(2.0 ** np.arange(60), 1))
    assert rows(found) == [str(10 * i) for i in (*range(ENDS), *range(60 - ENDS, 60))]
    assert (
        found[-1]
        == "the first and the last 20 of 60 scale changes and skipped steps; all steps with --json"
    )


def test_the_json_names_its_schema():
    assert played([8], 8).to_json()["schema_version"] == 1
