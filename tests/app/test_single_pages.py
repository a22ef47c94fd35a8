"""What single pages show, against the library."""

import json
import shutil

import made_runs as hand
import pyarrow as pa
import pytest
import torch
from app_pages import metrics, words
from audited_trainings import BF16, model, train
from made_profiles import profile

from mpdiag.analysis.comparison.compare import compare
from mpdiag.runs.results import add_to_meta

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def table_of(test):
    return next(t.value for t in test.dataframe if "verdict" in t.value)


def test_the_list_says_what_lies_in_each_folder(opened, root, tmp_path):
    for name in ("ssd", "ssd-fp16-plan", "gpt", "gpu-sample"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    (tmp_path / "gpt" / "plan.json").unlink()
    test = opened(tmp_path)
    rows = table_of(test).set_index("run")
    assert list(rows.index) == ["ssd", "ssd-fp16-plan", "gpu-sample", "gpt"]
    assert ", 4 shown" not in words(test)
    verdicts = rows["verdict"].map(lambda words: words[0])
    assert list(verdicts) == [
        *("needs scale 64", "as FP32 (one seed)", "86 % Tensor Cores", "not analyzed"),
    ]
    assert rows["mark"]["ssd-fp16-plan"] == "↳"
    assert rows["format"]["ssd-fp16-plan"] == "FP16, O1, emulated"
    assert rows["metric"]["ssd"] == "0.8453 mAP@0.5"
    assert list(rows["skipped"].dropna()) == [0, 0, 0]
    assert 2 < len(rows["losses"]["ssd"]) <= 60
    found = test.text_input(key="filter").set_value("detector").run()
    assert list(table_of(found)["run"]) == ["ssd", "ssd-fp16-plan"]
    assert ", 2 shown" in words(found)
    assert "No run here matches" in words(test.text_input(key="filter").set_value("xyz").run())
    assert list(table_of(opened(tmp_path, kinds="Profiles"))["run"]) == ["gpu-sample"]
    test = opened(tmp_path, "overview", run="gpt")  # which analyzes it
    seen = table_of(test.switch_page("views/runs.py").run()).set_index("run")["verdict"]
    assert seen["gpt"] == ["needs no scale"]


def test_sample_runs_come_after_one_s_own_and_only_if_asked_for(opened, root, tmp_path):
    for name in ("ssd", "digits"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    assert not any("sample/" in name for name in table_of(opened(tmp_path))["run"])
    test = opened(tmp_path, samples="true", run="sample/ssd")
    names = list(table_of(test)["run"])
    assert [name.startswith("sample/") for name in names] == [
        False,
        False,
        *[True] * (len(names) - 2),
    ]
    assert test.sidebar.selectbox[0].value == "sample/ssd"
    test = test.switch_page("views/overview.py").run()
    assert not test.exception
    (drawn,) = (block.value for block in test.code if "training.jsonl" in block.value)
    assert f"{root / 'sample_runs'}" in drawn  # the receipt reads the sample, not one's own run
    assert "'ssd-fp16-plan'" in drawn
    assert not opened(samples="true").sidebar.toggle  # nothing to add to the sample runs themselves


@pytest.mark.parametrize("view", ["overview", "verdict"])
def test_a_training_by_a_plan_leads_on_to_its_recording(opened, view):
    test = opened(view=view, run="ssd-fp16-plan")
    assert not test.exception
    assert not test.error
    assert any(
        '"Training"' in str(link.proto) or "Scale" in str(link.proto)
        for link in test.get("page_link")
    )
    (button,) = (one for one in test.button if "The recording ssd" in one.label)
    test = button.click().run()
    assert test.sidebar.selectbox[0].value == "ssd"
    assert "with a loss scale of 64" in test.warning[0].value


def test_what_is_drawn_at_once_is_sent_before_the_heat_map(opened, monkeypatch):
    """The browser's one thread draws in the order of arrival, and the heat map takes longest."""
    import widgets

    sent, before = [], widgets.show

    def noted(picture, **options):
        sent.append(picture.key)
        return before(picture, **options)

    monkeypatch.setattr(widgets, "show", noted)
    opened(view="gradients", run="ssd", scale="3")
    assert sent == ["layer-scales", "heat-map"]


def test_a_button_closes_a_layer(opened):
    test = opened(view="layers", run="ssd", layer="trunk.1", scale="3", format="fp8_e4m3")
    assert test.session_state["format"] == "fp8_e4m3"
    next(button for button in test.button if button.label == "All layers").click().run()
    assert not test.exception
    assert test.session_state["layer"] is None


def test_numbers_are_written_as_people_write_them(opened):
    import widgets

    assert widgets.relative_error(0.0257) == "2.57 %"
    assert widgets.relative_error(5.09e-6) == "< 0.01 %"
    assert widgets.relative_error(12.34) == "12.3 ×"
    assert widgets.relative_error(float("inf")) == "∞"


def test_operations_are_ranked_by_the_best_that_is_known(opened, root, tmp_path):
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "run")
    test = opened(tmp_path, "operations")
    (ranked,) = (t for t in test.dataframe if "worst gradient" in t.value)
    # The cells as they are shown.
    said = pa.ipc.open_stream(ranked.proto.arrow_data.styler.display_values).read_pandas()
    assert said["relative error of weight gradients"].iloc[0] == "2.57 %"
    assert "< 0.01 %" in list(said["output error"])  # and not 0.00000509
    (tmp_path / "run" / "sensitivity.json").unlink()
    test = opened(tmp_path, "operations")
    assert "Estimated from the recorded values" in words(test).replace("\\", "")
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


def test_a_profile_beside_its_trace_shows_one_or_the_other(opened):
    test = opened(view="tensor_cores", run="gpu-sample")
    assert not test.exception
    charts = " ".join(str(chart.proto) for chart in test.get("plotly_chart"))
    assert "idle: waiting for data" in charts
    assert "TF32 off" in words(test)
    stored = test.selectbox(key="trace-gpu-sample").set_value("profile.json").run()
    assert "What each cause costs" in words(stored)


def pair(test):
    return [box.value for box in test.selectbox if box.key in ("a", "b")]


def test_only_related_runs_are_compared_unasked(opened, root, tmp_path):
    assert pair(opened(view="compare", run="ssd-fp16-no-scale")) == ["ssd", "ssd-fp16-no-scale"]
    for name in ("ssd", "ssd-2", "digits"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    test = opened(tmp_path, view="compare", run="ssd")
    assert pair(test) == ["ssd", "ssd-2"]  # of one model
    assert len(test.get("plotly_chart")) == 2  # losses, intervals
    alone = opened(tmp_path, view="compare", run="digits")
    assert "No other run here has the plan or the model of digits" in words(alone)
    chosen = test.selectbox(key="b").set_value("digits").run()
    assert "two different models" in chosen.warning[0].value
    asked = opened(tmp_path, view="compare", run="digits", a="digits", b="ssd")
    assert not asked.exception
    assert "two different models" in asked.warning[0].value


def test_folders_of_seeds_are_compared_as_the_command_does(opened, root, tmp_path):
    for side, source, moved in (("fp32", "ssd", 0.0), ("fp16", "ssd-fp16-plan", 0.0005)):
        for seed in range(3):
            run = tmp_path / side / f"seed{seed}"
            log = [{"step": i, "loss": 1 / (i + 1), "scale": 1.0} for i in range(3)]
            log += [{"metric": "accuracy", "value": 0.9 + moved + seed / 1e3}]
            hand.write_log(run, *log)
            meta = json.loads((root / "sample_runs" / source / "meta.json").read_text())
            (run / "meta.json").write_text(json.dumps(meta | {"seeds": {"torch": seed}}))
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "digits")
    test = opened(tmp_path, view="compare", a="fp32", b="fp16")
    assert not test.exception
    assert "equivalent]" in words(test)
    assert compare(tmp_path / "fp32", tmp_path / "fp16").verdict == "equivalent"
    table = next(t.value for t in test.dataframe if "seeds" in t.value)
    assert list(table["seeds"]) == [3, 3]
    assert list(table["trained in"]) == ["FP32 recording", "FP16, level O1"]


def test_trainings_that_claim_half_precision_and_ran_in_none_are_no_comparison(
    opened, root, tmp_path
):
    for name in ("ssd", "ssd-2"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    training = {"dtype": "float16", "level": "O1"}
    add_to_meta(tmp_path / "ssd-2", training=training, half_precision_flops=0.0)
    test = opened(tmp_path, "compare", run="ssd", a="ssd", b="ssd-2")
    assert not test.exception
    assert "claims float16, and none of its matrix products ran in it" in test.error[0].value
    assert not test.get("plotly_chart")
    test = opened(tmp_path, "training", run="ssd-2", trainings="ssd-2")
    assert "none of its matrix products ran in it" in test.error[0].value


def test_the_precision_of_a_training(opened, tmp_path):
    weights = model(BF16)
    audit = train(weights, torch.optim.AdamW(weights.parameters(), lr=1e-2), tmp_path / "bf16")
    test = opened(tmp_path, "precision", run="bf16")
    assert not test.exception
    assert f"**{audit.line}.**" in words(test).replace("\\", "")
    (table,) = (t.value for t in test.dataframe)
    assert table["parameters"].tolist() == ["0.weight and 5 more"]
    assert table["states"].tolist() == ["BF16"]
    assert [fold.label.replace("\\", "").rstrip(".") for fold in test.expander] == [
        f.message[:1].upper() + f.message[1:] for f in audit.findings
    ]
    (answers,) = (t.value for t in test.table)
    assert answers["answer"].tolist() == ["exactly", "up to rounding", *["no"] * 3]
    verdict = opened(tmp_path, "verdict", run="bf16")
    assert "FP16 or BF16?" in [header.value for header in verdict.header]
    assert "Both should work" in words(verdict)
