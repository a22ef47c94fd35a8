"""The figure of bars that follows the slider: its numbers, and what a browser draws of them."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from app_pages import drawn_bars
from browsing import at_rest, open_view

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views.gradients.figure import MOST
from mpdiag.reports.views.gradients.frame import scale_frame

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")
pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare

FIGURE = ".st-key-figure-consequences"
WIDTHS = """[...document.querySelectorAll('.st-key-figure-consequences .series')[0].children]
    .filter((mark) => mark.tagName === 'rect').map((mark) => Number(mark.getAttribute('width')))"""


def lost_at(folder, exponent):
    frame = scale_frame(analyze(folder).loss_scale.late, FP16, exponent)
    return frame.set_index("layer")


@pytest.mark.parametrize("exponent", [0, 16, 24])
def test_each_row_has_the_numbers_of_its_layer(opened, root, exponent):
    sent = drawn_bars(opened(view="gradients", run="ssd", scale=str(exponent)))
    frame = lost_at(root / "sample_runs" / "ssd", exponent)
    assert len(sent["rows"]) == min(MOST, len(frame))
    values = {one["name"]: one["values"] for one in sent["series"]}
    assert ("overflows" in values) == bool((frame["overflow"] > 0).any())
    for i, row in enumerate(sent["rows"]):
        layer = row["hint"].split(": ")[0]
        own = frame.loc["" if layer == "(the model)" else layer]
        assert values["values lost"][i] == own["lost_share"]
        assert values["Σ|x| lost"][i] == own["sum_share"]
        assert f"values lost {percent(own['lost_share'])}" in row["hint"]
        over = values.get("overflows", [None] * len(sent["rows"]))[i]
        assert over == (own["overflow_share"] if own["overflow"] else None)
    assert sent["top"] >= max(v for one in sent["series"] for v in one["values"] if v is not None)


def test_bars_follow_the_slider_in_the_figure_that_stays(page, address, runs):
    page.set_viewport_size({"width": 1400, "height": 900})
    open_view(page, address, "gradients", run="ssd", scale=6)
    page.locator(f"{FIGURE} svg").wait_for()
    at_rest(page)
    page.evaluate("document.querySelector('.st-key-figure-consequences .bars-figure').old = true")
    for exponent in (5, 4):
        page.get_by_role("slider").first.press("ArrowLeft")
        title = page.locator('[data-testid="stHeading"]').filter(has_text="What FP16 loses at")
        title.filter(has_text=f"scale of {2**exponent}").wait_for()
        at_rest(page)
        shares = sorted(lost_at(runs / "ssd", exponent)["lost_share"], reverse=True)
        wide = sorted(page.evaluate(WIDTHS), reverse=True)
        assert len(wide) == min(MOST, len(shares))
        for width, share in zip(wide[:5], shares, strict=False):
            assert width / wide[0] == pytest.approx(share / shares[0], abs=1e-3)
        assert page.evaluate(
            "document.querySelector('.st-key-figure-consequences .bars-figure').old"
        )


def test_a_row_says_its_numbers_to_a_pointer_and_the_figure_to_a_reader(page, address, runs):
    open_view(page, address, "gradients", run="ssd", scale=0)
    page.locator(f"{FIGURE} svg").wait_for()
    at_rest(page)
    lost = percent(lost_at(runs / "ssd", 0).loc["trunk.1", "lost_share"])
    page.locator(f"{FIGURE} rect").filter(has_text="trunk.1: ").first.hover()
    page.locator(f"{FIGURE} .said").filter(has_text=f"trunk.1: values lost {lost}").wait_for()
    words = page.locator(f"{FIGURE} .bars-figure").get_attribute("aria-label")
    assert "loses" in words
    assert "Σ|x| is the share" in words


def test_it_fits_a_phone_and_is_saved_with_its_caption(page, address, tmp_path):
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    open_view(page, address, "gradients", run="ssd", scale=0)
    figure = page.locator(f"{FIGURE} svg")
    figure.wait_for()
    at_rest(page)
    assert figure.bounding_box()["width"] <= 390
    ends = "[...document.querySelectorAll('.st-key-figure-consequences text')]"
    ends += ".map((word) => word.getBoundingClientRect()).map((box) => [box.left, box.right])"
    assert all(0 <= left <= right <= 390 for left, right in page.evaluate(ends))
    at = [h.inner_text() for h in page.get_by_role("button", name="Receipt").all()]
    assert len(at) == 4
    page.get_by_role("button", name="Receipt").nth(2).click()
    button = page.get_by_role("button", name="Figure (SVG)").first
    button.wait_for()
    with page.expect_download() as download:
        button.click()
    assert download.value.suggested_filename == "consequences.svg"
    download.value.save_as(tmp_path / "consequences.svg")
    root = ET.parse(tmp_path / "consequences.svg").getroot()
    words = " ".join(root.itertext())
    assert "Σ|x| is the share" in words
    assert "trunk.1" in words
    inner = [one for one in root if one.tag.endswith("svg")]
    assert [one.get("color") for one in inner] == ["rgb(228, 233, 240)"]  # light words on dark
