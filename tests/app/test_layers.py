"""The table of layers, the page of one layer, and the layers of one step."""

from __future__ import annotations

import re

import pytest
from app_pages import titles, words

from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.layer_history import explain_layer
from mpdiag.display.wording import sentence

pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def test_the_table_of_layers_is_the_analysis_s(opened, root):
    analysis = analyze(root / "sample_runs" / "ssd")
    test = opened(view="layers", run="ssd", find="trunk.1")
    frame = test.dataframe[0].value.set_index("layer")
    assert all("trunk.1" in name for name in frame.index)
    lost = analysis.figures.find("layer-sum", "trunk.1")
    assert frame.loc["trunk.1", "sum_share"] == lost.value
    values = analysis.figures.find("layer-values", "trunk.1")
    assert frame.loc["trunk.1", "lost_share"] == values.value
    assert "No layer has “zzz”" in words(opened(view="layers", run="ssd", find="zzz"))


def test_a_link_opens_a_layer(opened, root):
    test = opened(view="layers", run="ssd", layer="trunk.1", scale="3", format="FP16")
    assert not test.exception
    assert "trunk.1 · ReLU" in titles(test)
    assert len(test.get("plotly_chart")) == 5
    roles = explain_layer(root / "sample_runs" / "ssd", "trunk.1").roles
    shown = words(test).replace("\\", "")
    assert roles
    assert all(sentence(role) in shown for role in roles)
    assert test.slider(key="scale").value == 3
    assert "holds no operation of this layer" not in shown
    next(button for button in test.button if button.label == "All layers").click().run()
    assert not test.exception
    assert test.session_state["layer"] is None


def test_a_parameter_has_a_page_of_its_weight_gradients(opened):
    test = opened(view="layers", run="ssd", layer="trunk.0.weight")
    assert not test.exception
    assert "No activation gradients of it were recorded; these are weight gradients." in words(
        test
    ).replace("\\", "")


def test_a_rise_of_the_loss_leads_to_the_layers_of_its_step(opened):
    test = opened(view="layers", run="ssd", tab="One step")
    assert not test.exception
    rise = re.search(r"The largest rise is at step (\d+)", words(test)).group(1)
    step = int(test.select_slider(key="step").value)
    assert abs(step - int(rise)) <= 20  # the recording's own distance
    assert f"Layers that moved most at step {step}" in words(test)
    test.select_slider(key="step").set_value("300").run()
    assert "Layers that moved most at step 300" in words(test)
    linked = opened(view="layers", run="ssd", tab="One step", step="220")
    assert "Layers that moved most at step 220" in words(linked)
