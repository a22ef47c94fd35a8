"""Operations and kernels: how sensitive they are, and where they ran."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
from app_pages import metrics, words
from made_profiles import profile

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def as_written(table):
    """The cells of a table as they are shown."""
    return pa.ipc.open_stream(table.proto.arrow_data.styler.display_values).read_pandas()


def test_numbers_are_written_as_people_write_them(opened):
    import widgets

    assert widgets.relative_error(0.0257) == "2.57 %"
    assert widgets.relative_error(5.09e-6) == "< 0.01 %"
    assert widgets.relative_error(12.34) == "12.3 ×"
    assert widgets.relative_error(float("inf")) == "∞"


def test_operations_are_ranked_by_the_best_that_is_known(opened, root, tmp_path):
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "run")
    test = opened(tmp_path, "operations")
    assert "Measured: each operation ran once" in words(test).replace("\\", "")
    ranked = next(t.value for t in test.dataframe if "worst gradient" in t.value)
    error = ranked["relative error of weight gradients"]
    assert list(error) == sorted(error, reverse=True)
    assert "normalisation" in ranked["why the plan keeps it in FP32"].iloc[0]
    said = as_written(next(t for t in test.dataframe if "worst gradient" in t.value))
    assert said["relative error of weight gradients"].iloc[0] == "2.57 %"
    assert "< 0.01 %" in list(said["output error"])  # and not 0.00000509
    (tmp_path / "run" / "sensitivity.json").unlink()
    test = opened(tmp_path, "operations")
    assert "Estimated from the recorded values alone" in words(test).replace("\\", "")
    (tmp_path / "run" / "sensitivity.json").write_text("{")
    assert "is damaged" in words(opened(tmp_path, "operations"))


def test_a_profile_with_its_what_if(opened, root, tmp_path):
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "run")
    (tmp_path / "run" / "profile.json").write_text(json.dumps(profile()))
    test = opened(tmp_path, "tensor_cores")
    assert not test.exception
    shown = metrics(test)
    assert shown["On Tensor Cores"] == "60.00 %"
    assert "Faster by at most" not in shown  # as long as no fix is ticked
    assert "Tick fixes" in words(test)
    assert "<u>" not in words(test).replace("\\<", "")
    (tmp_path / "run" / "profile.json").write_text("{")
    assert "is damaged" in words(test.run())


def test_a_cpu_s_units_are_called_by_their_name(opened):
    test = opened(view="tensor_cores", run="digits")
    assert not test.exception
    charts = " ".join(str(chart.proto) for chart in test.get("plotly_chart"))
    assert "vector units" in charts
    assert "CUDA" not in charts
    assert "Roofline" not in words(test)
    assert "What would a fix gain?" not in words(test)


def test_the_gpu_sample_shows_causes_a_step_on_the_clock_and_idle_time(opened):
    test = opened(view="tensor_cores", run="gpu-sample")
    assert not test.exception
    titles = words(test)
    for title in ("What each cause costs", "Step 12 on the clock", "What each step's time went to"):
        assert title in titles
    assert test.selectbox(key="trace-gpu-sample").value == "trace.json.gz"
    charts = " ".join(str(chart.proto) for chart in test.get("plotly_chart"))
    assert "TF32 off" in charts
    assert "idle: waiting for data" in charts
    test.segmented_control(key="step-trace.json.gz").set_value("10").run()
    assert "Step 10 on the clock" in words(test)
    stored = test.selectbox(key="trace-gpu-sample").set_value("profile.json").run()
    assert "on the clock" not in words(stored)
    assert "What each cause costs" in words(stored)


def test_without_a_profile_the_page_says_how_to_get_one(opened):
    test = opened(view="tensor_cores", run="ssd")
    assert "mpdiag profile TRACE" in test.code[0].value
