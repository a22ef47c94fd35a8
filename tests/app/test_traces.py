"""Traces in a run's folder and from the user's disk, as the page of Tensor Cores takes them."""

from __future__ import annotations

import errno
import importlib
import io
import shutil

import pytest

pytest.importorskip("streamlit.testing.v1", reason="needs Streamlit, of the extra `app`")
pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def test_of_the_files_beside_a_profile_the_first_trace_is_shown(opened, root, tmp_path):
    run = shutil.copytree(root / "sample_runs" / "gpu-sample", tmp_path / "run")
    (run / "log.txt").write_text("epoch 1")
    test = opened(folder=tmp_path, view="tensor_cores", run="run")
    assert not test.error
    assert test.selectbox(key="trace-run").value == "trace.json.gz"
    (run / "trace.json.gz").write_bytes(b"another state of the file")
    test.run()
    assert "is not a trace" in test.error[0].value
    again = opened(folder=tmp_path, view="tensor_cores", run="run")
    assert not again.error
    assert again.selectbox(key="trace-run").value == "profile.json"


@pytest.mark.parametrize(
    "name", ["..", "../../x.json", "/etc/x.json", "a\0b", "ä" * 300, "", "\ud800"]
)
def test_an_uploaded_file_of_any_name_stays_in_its_folder(root, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(root / "app"))
    traces = importlib.import_module("traces")
    file = io.BytesIO(b"{}")
    file.name = name
    path = traces._written(tmp_path / "0", file)
    assert path.parent == tmp_path / "0"
    assert path.read_bytes() == b"{}"
    monkeypatch.setattr(traces.shutil, "copyfileobj", full_disk)
    assert "No space left" in traces._read([file])


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
