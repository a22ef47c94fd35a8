"""Analyses of which every view is drawn."""

import made_runs as hand
import pytest

from mpdiag.analysis.analyzer import analyze


@pytest.fixture(scope="module", params=["digits", "by hand", "two ranks", "scaled"])
def analysis(request, root, tmp_path_factory):
    if request.param == "digits":
        return analyze(root / "sample_runs" / "digits")
    folder = tmp_path_factory.mktemp("runs") / "hand"
    options = {"two ranks": {"world_size": 2}, "scaled": {"scale": 4.0}}
    return analyze(hand.write_run(folder, **options.get(request.param, {})))
