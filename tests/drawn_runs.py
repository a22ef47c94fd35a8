"""Analyses of which every view is drawn."""

import made_runs as hand
import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views.gradients.frame import in_model_order
from mpdiag.reports.views.gradients.pictures import Gradients


@pytest.fixture(scope="module", params=["digits", "by hand", "two ranks", "scaled"])
def analysis(request, root, tmp_path_factory):
    if request.param == "digits":
        return analyze(root / "sample_runs" / "digits")
    folder = tmp_path_factory.mktemp("runs") / "hand"
    options = {"two ranks": {"world_size": 2}, "scaled": {"scale": 4.0}}
    return analyze(hand.write_run(folder, **options.get(request.param, {})))


def layers_of(analysis, kind="activation_grad"):
    """The layers of one kind over all steps, in the order of the model."""
    return in_model_order(analysis.layers.of_kind(kind), analysis.run.modules())


def of_layers(analysis, kind="activation_grad", fmt=FP16, **options):
    """Their tables and pictures."""
    return Gradients(str(analysis.run.folder), kind, layers_of(analysis, kind), fmt, **options)
