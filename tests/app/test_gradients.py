"""The page of gradients against the library."""

from __future__ import annotations

import pytest
from app_pages import words

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import counted, percent
from mpdiag.numerics.formats import FP8_E4M3, FP16
from mpdiag.reports.views.gradients.frame import layers_named, scale_frame, summary

ALL = "over all recorded steps"
pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def test_the_slider_shows_what_the_library_computes(opened, root):
    layers = analyze(root / "sample_runs" / "ssd").layers.of_kind("weight_grad")
    test = opened(view="gradients", run="ssd", kind="weight gradients")
    for exponent in (0, 3, 11, 24):
        test.slider(key="scale").set_value(exponent).run()
        expected = summary(scale_frame(layers, FP16, exponent))
        line = words(test).replace("\\", "")
        assert f"makes {percent(expected.lost_share)} of the non-zero values 0" in line
        if expected.worst_sum_share:
            lost = percent(expected.worst_sum_share)
            assert f"{expected.worst_layer} loses most, {lost} of its sum" in line
        many = expected.overflow_layers
        over = f"{counted(many, 'layer')} overflow" if many else "no layer overflows"
        assert f"{over}{'s' if many == 1 else ''} in any recorded step" in line
    assert expected.overflow_layers > 0  # at 2^24 some do


def test_a_link_reopens_its_view(opened, root):
    test = opened(
        view="gradients",
        run="ssd",
        scale="5",
        format="E4M3",
        find="trunk",
        steps=ALL,
    )
    assert test.slider(key="scale").value == 5
    assert test.text_input(key="find").value == "trunk"
    layers = analyze(root / "sample_runs" / "ssd").layers.of_kind("activation_grad")
    expected = summary(scale_frame(layers_named(layers, "trunk"), FP8_E4M3, 5))
    shown = words(test).replace("\\", "")
    assert f"makes {percent(expected.lost_share)} of the non-zero values 0" in shown


def test_no_scale_multiplies_activations(opened, root):
    layers = analyze(root / "sample_runs" / "ssd").layers.of_kind("activation")
    test = opened(view="gradients", run="ssd", kind="activations", scale="11")
    expected = summary(scale_frame(layers, FP16, 0))
    shown = words(test).replace("\\", "")
    assert f"makes {percent(expected.lost_share)} of the non-zero values 0" in shown
    assert "Without a loss scale" in shown
    assert test.slider(key="scale").disabled


def test_what_is_drawn_at_once_is_sent_before_the_heat_map(opened, monkeypatch):
    """The browser's one thread draws in the order of arrival, and the heat map takes longest."""
    import figure_card

    sent, before = [], figure_card.figure_card

    def noted(picture, **options):
        sent.append(picture.key)
        return before(picture, **options)

    import widgets

    monkeypatch.setattr(widgets, "figure_card", noted)
    monkeypatch.setattr(figure_card, "figure_card", noted)
    opened(view="gradients", run="ssd", scale="3")
    assert sent == ["layer-scales", "consequences", "every-scale", "heat-map"]
