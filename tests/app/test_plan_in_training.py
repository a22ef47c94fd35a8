"""A plan beside trainings: what their logs say."""

import made_runs as hand
from plan_in_training import remarks

from mpdiag.runs.training_log import read_log


def test_what_a_log_notes_is_a_warning_or_good_news(tmp_path):
    lines = [
        *({"source": "recording"}, {"step": 0, "loss": 1.0, "scale": 1.0}, {"stopped": "why"}),
        *({"half_precision_flops": share, "message": f"{share}"} for share in (1.0, 0.5, 0.0)),
        *({"severity": severity, "message": severity} for severity in ("info", "warning")),
        {"alarm": "underflow", "step": 0, "predicted": 0.1, "observed": 0.7, "message": "left"},
    ]
    hand.write_log(tmp_path, *lines)
    told = remarks({"run": read_log(tmp_path)})
    assert told == [  # not that a recording wrote the log, nor alarms, which are drawn
        *(("run: why", True), ("run: 1.0", False), ("run: 0.5", False), ("run: 0.0", True)),
        *(("run: info", False), ("run: warning", True)),
    ]
