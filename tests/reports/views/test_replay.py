"""The replay of a scaler is the analysis's own."""

from __future__ import annotations

from mpdiag.analysis.scaling.replay import replay_run
from mpdiag.reports.views import replay


def test_the_replay_is_the_analysis_own(analysis):
    played = replay_run(analysis.run, "backoff", init_scale=2.0**24)
    picture = replay.replayed("RUN", played, "--scaler backoff")
    assert picture.frame["overflow"].sum() == played.skips > 0
    line = next(t for t in picture.figure.data if t.name == "loss scale")
    assert list(line.y) == list(played.scale)
    assert "'mpdiag', 'replay', 'RUN', '--scaler', 'backoff', '--json'" in picture.receipt
