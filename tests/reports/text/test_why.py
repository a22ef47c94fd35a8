"""What ``mpdiag replay`` prints: its answer, then the steps in which something changes."""

import math
from pathlib import Path

import numpy as np
from calls import printed
from goldens import assert_as_kept

from mpdiag.analysis.scaling.replay import Replay
from mpdiag.reports.text.why import replay_text


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


REPLAYS = {
    "a scale that stays": played([8, 8, 8], 8),
    "a scale that falls": played([32, 16, 8, 8], 8, skipped=[0, 1]),
    "a constant scale that always overflows": played([64, 64], 64, skipped=[0, 1]),
    "a scale that grows after the last recorded step": played([8], 16),
    "values lost in some steps": played([1, 1, 1], 1, lost=[0.1, 0.25, 0.2]),
    "hardly any": played([1, 1, 1], 1, lost=[0.0, 0.0, 1e-6]),
    "gradients of one step": played([1, 1, 1], 1, lost=[math.nan, 0.5, math.nan]),
    "no gradients": played([1, 1, 1], 1, lost=math.nan),
    "many changes, of which both ends are listed": played(2.0 ** np.arange(60), 1),
}


def test_the_answer_comes_first_and_only_changes_are_listed():
    texts = [f"# {name}\n{printed(replay_text(r), width=100)}" for name, r in REPLAYS.items()]
    assert_as_kept(Path(__file__).with_name("replays.txt"), "\n".join(texts))


def test_the_json_names_its_schema():
    assert played([8], 8).to_json()["schema_version"] == 1
