"""What a machine without a package index can do: record, analyze and train with the core alone.

Such a machine has what PyTorch brings, pandas, pyarrow, typer, rich, Numba and safetensors. The
libraries that serve documents, URLs, pages and the demo are blocked here, as if they were missing.
"""

import os
import subprocess
import sys
import textwrap

import pytest
from script_processes import TRAIN, scripts

OWN_SCRIPTS = scripts(__file__)

BLOCKED = (
    *("msgspec", "pydantic", "upath", "streamlit", "plotly", "sklearn", "PIL"),
    *("duckdb", "lightning", "transformers", "accelerate"),
)
TRAINING = OWN_SCRIPTS["training"]
SCRIPTS = OWN_SCRIPTS["scripts"]


@pytest.mark.parametrize(
    ("program", "said"), [(TRAINING, "trained complete"), (SCRIPTS, "trained 4")]
)
def test_recording_analysis_and_training_need_the_core_alone(root, tmp_path, program, said):
    (tmp_path / "train.py").write_text(TRAIN)
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program).format(blocked=BLOCKED)],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert said in child.stdout.splitlines()[-1]


def test_what_needs_more_says_so_in_a_sentence(tmp_path, monkeypatch):
    from mpdiag.errors import UsageError
    from mpdiag.runs.training_log import LogWriter, TrainingStep, read_log

    log = LogWriter(tmp_path)
    log.append(TrainingStep(0, 1.0, 8.0))
    log.close()
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(UsageError, match="pip install msgspec"):
        read_log(tmp_path)
