"""The history of one layer, and what is said of a name that is none."""

import pytest
from judged_runs import record

from mpdiag.analysis.layer_history import explain_layer
from mpdiag.errors import LayerNotFound


def test_a_name_like_no_layer_is_answered_with_the_layers(tmp_path):
    folder = record(tmp_path / "run")
    with pytest.raises(LayerNotFound, match=r"has no layer 'zzzzzz': it has \w+"):
        explain_layer(folder, "zzzzzz")
