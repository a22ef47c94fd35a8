"""What a person sees: the dashboard and the report in a real browser.

Debian's Chromium, driven by Playwright; skipped where either is missing.
"""

import os
import subprocess
import sys
import time
from xml.etree import ElementTree as ET

import pytest
from app_pages import VIEWS
from browsing import PATIENCE, at_rest, open_view

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import percent, superscript
from mpdiag.numerics.formats import FP16
from mpdiag.reports.views.gradients.frame import in_model_order, scale_frame, summary

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytestmark = pytest.mark.long

TRAINING = """
import sys, time, torch
from mpdiag.recording import ledger
from mpdiag.recording.recorder import record
ledger._FLUSH_SECONDS = 0.2
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with record(model, optimizer, sys.argv[1], every=1):
    for _ in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""


def test_every_view_of_a_hostile_run_without_an_error(page, address):
    for view in ("", *VIEWS):
        open_view(page, address, view, run="hostile")
        if view == "compare":
            page.get_by_text("No other run here has the plan or the model of").wait_for()
        elif view == "layers":
            page.locator('[data-testid="stDataFrame"]').first.wait_for()
        elif view in ("gradients", "updates", "operations"):
            page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert page.locator('[data-testid="stException"]').count() == 0
        assert page.evaluate("window.hacked") is None
        if view == "gradients":
            page.locator(".js-plotly-plot").filter(has_text='window.hacked=1">').first.wait_for()


def test_the_slider_moves_the_numbers_and_its_link_reopens_them(page, address, runs):
    layers = analyze(runs / "ssd").loss_scale.late

    def expected(exponent):
        lost = percent(summary(scale_frame(layers, FP16, exponent)).lost_share)
        return f"{lost} of the non-zero values become 0"

    open_view(page, address, "gradients", run="ssd", scale=6)
    line = page.locator('[data-testid="stCaptionContainer"]')
    line.filter(has_text=expected(6)).first.wait_for()
    slider = page.get_by_role("slider").first
    for exponent in (5, 4):
        slider.press("ArrowLeft")
        line.filter(has_text=expected(exponent)).first.wait_for()
        marks = page.locator(".st-key-figure-layer-scales .annotation-text")
        marks.filter(has_text=f"selected 2{superscript(exponent)}").wait_for()
    assert expected(4) != expected(6)
    page.wait_for_url("**scale=4**")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    line.filter(has_text=expected(4)).first.wait_for()
    assert page.url == link


def test_clicks_lead_from_a_picture_to_a_layer_and_a_step(page, address, runs):
    page.set_viewport_size({"width": 1400, "height": 900})
    open_view(page, address, "gradients", run="ssd-2", scale=3)
    heat = page.locator(".st-key-figure-heat-map")
    heat.locator(".main-svg").first.wait_for()
    plane, slider = heat.locator(".nsewdrag").first, page.get_by_role("slider").first
    # The slider and the heat map that it moves are seen together.
    assert slider.bounding_box()["y"] > 0
    bottom = heat.locator(".js-plotly-plot").bounding_box()
    assert bottom["y"] + bottom["height"] <= 900
    # Its rows stand level with those of the losses at each scale.
    beside = page.locator(".st-key-figure-layer-scales .nsewdrag").first.bounding_box()
    assert abs(beside["y"] - plane.bounding_box()["y"]) < 1
    assert abs(beside["height"] - plane.bounding_box()["height"]) < 1
    analysis = analyze(runs / "ssd-2")
    late = in_model_order(analysis.loss_scale.late, analysis.run.modules())
    names = [str(name) for name in late.names]
    row = names.index("trunk.1")
    box = plane.bounding_box()
    at = box["x"] + 0.4 * box["width"], box["y"] + (row + 0.5) / len(names) * box["height"]
    page.mouse.move(*at)  # the pointer arrives first, and plotly says what it is over
    page.wait_for_timeout(300)
    page.mouse.click(*at)
    page.get_by_role("heading", name="trunk.1 · ReLU").wait_for()
    over_time = page.locator(".st-key-figure-over-time")
    over_time.locator(".main-svg").first.wait_for()
    page.wait_for_url("**scale=3**")
    caption = page.locator('[data-testid="stCaptionContainer"]').filter(has_text="ssd-2 · Detector")
    caption.first.wait_for()
    page.get_by_role("button", name="All layers").click()
    table = page.locator('[data-testid="stDataFrame"]').first
    table.locator("canvas").first.wait_for()
    at_rest(page)
    page.wait_for_timeout(500)
    table.click(position={"x": 60, "y": 36 * (names.index("trunk.0") + 1.5)})
    page.get_by_role("heading", name="trunk.0 · Conv2d").wait_for()


def test_a_figure_is_saved_with_its_caption(page, address, tmp_path):
    open_view(page, address, "layers", run="ssd", layer="trunk.1")
    page.locator(".st-key-figure-over-time .main-svg").first.wait_for()
    at_rest(page)
    page.get_by_role("button", name="Receipt").first.click()
    found = {}
    for kind in ("SVG", "PNG"):
        button = page.get_by_role("button", name=f"Figure ({kind})").first
        button.wait_for()
        with page.expect_download() as download:
            button.click()
        found[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(found[kind])
    assert {path.name for path in found.values()} == {"over-time.svg", "over-time.png"}
    root = ET.parse(found["SVG"]).getroot()
    words = " ".join(root.itertext())
    assert "trunk.1 over time" in words
    assert "Each column is a recorded step" in words
    assert root.findall(".//{http://www.w3.org/2000/svg}image")  # the cells of the heat map
    assert found["PNG"].read_bytes().startswith(b"\x89PNG")
    assert found["PNG"].stat().st_size > 20_000  # no empty ground


def test_a_click_on_a_row_of_the_list_opens_its_run(page, address):
    """Also of a sorted list; a click on a heading sorts and opens nothing."""
    row = 35  # pixels of a line, of the heading too
    open_view(page, address, "runs")
    table = page.locator('[data-testid="stDataFrame"]')
    table.locator("canvas").first.wait_for()
    at_rest(page)
    table.click(position={"x": 270, "y": 2.5 * row})  # the verdict of ssd-2, below ssd
    heading = page.locator('[data-testid="stHeading"]').first
    playwright.expect(heading).to_have_text("ssd-2", timeout=PATIENCE)
    page.wait_for_url("**/overview?run=ssd-2")
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert page.get_by_role("combobox").first.get_attribute("aria-label") is not None
    page.locator(".st-key-findings summary").first.click()
    page.get_by_text("How it was computed").first.wait_for()  # the finding has unfolded
    page.get_by_role("link", name="Why").click()
    page.wait_for_url("**/verdict?run=ssd-2")  # once: the address keeps the sidebar's run by itself

    open_view(page, address, "runs")
    table.locator("canvas").first.wait_for()
    at_rest(page)
    table.click(position={"x": 100, "y": row / 2})  # from A to Z: hostile, ssd, ssd-2, torn
    page.wait_for_timeout(1500)
    assert "/runs" in page.url
    table.click(position={"x": 100, "y": 1.5 * row})
    page.wait_for_url("**/overview?run=hostile")

    open_view(page, address, "runs", filter="ssd-2")  # what is typed into the filter
    table.locator("canvas").first.wait_for()
    at_rest(page)
    table.click(position={"x": 270, "y": 1.5 * row})
    page.wait_for_url("**/overview?run=ssd-2")


def test_a_live_run_grows_on_screen(page, address, runs, root):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(runs / "live")],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    try:
        while not list((runs / "live").glob("stats/*.parquet")):
            assert trainer.poll() is None
            time.sleep(0.1)
        open_view(page, address, "gradients", run="live")
        line = page.locator('[data-testid="stCaptionContainer"]').filter(has_text="steps recorded")
        line.first.wait_for()
        before = line.first.inner_text()
        assert "recording, last written" in before
        so_far = page.locator('[data-testid="stAlert"]').filter(has_text="Recording in progress")
        so_far.filter(has_text="So far: ").first.wait_for()
        steps = int(before.split(" of ")[0].rsplit(" ", 1)[1])
        page.wait_for_function(
            """steps => [...document.querySelectorAll('[data-testid="stCaptionContainer"]')].some(
                e => Number((e.innerText.match(/(\\d+) of \\d+ steps recorded/) || [])[1]) > steps)""",
            arg=steps,
        )
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trace_is_opened_from_disk_and_closed_again(page, address, root, tmp_path):
    open_view(page, address, "tensor_cores", run="ssd")
    chooser = page.locator('input[type="file"]')
    foreign = tmp_path / "notes.json"
    foreign.write_text("no trace")
    chooser.set_input_files(foreign)
    page.get_by_text("notes.json is not a trace").wait_for()
    at_rest(page)  # the field of the first file is gone
    playwright.expect(chooser).to_have_count(1, timeout=PATIENCE)
    chooser.set_input_files(root / "sample_runs" / "gpu-sample" / "trace.json.gz")
    page.get_by_text("What each step's time went to").wait_for()
    page.get_by_role("button", name="Close").click()
    page.get_by_text("This run has no profile yet").wait_for()


def test_another_pair_is_chosen_and_its_link_reopens_it(page, address):
    open_view(page, address, "compare", run="ssd")
    page.get_by_text("ssd-2 against ssd").wait_for()
    page.get_by_role("combobox").nth(2).click()
    page.get_by_role("option", name="hostile").click()
    page.get_by_text("These are two different models").wait_for()
    page.wait_for_url("**b=hostile**")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.get_by_text("These are two different models").wait_for()


LOADED = (
    """performance.getEntriesByType("resource").map((e) => e.name.split("/").pop().split(".")[0])"""
)
RUN = (
    "document.getElementById('plotly.js-style-global') !== null"  # which Plotly makes as it starts
)


def test_a_dashboard_is_opened_by_its_token_alone(locked, page):
    # `locked` comes first, so its server outlives the page: one whose server is gone complains.
    bare, _, token = locked.partition("?")
    assert token.startswith("token=")
    assert page.goto(bare).status == 403
    page.get_by_text("This dashboard needs its token").wait_for()
    page.goto(locked)
    page.locator('.js-plotly-plot, [data-testid="stDataFrame"]').first.wait_for()
    assert "token" not in page.url
    other = page.context.new_page()  # a page that is left while it talks to its server complains
    other.goto(f"{bare}runs")  # the cookie holds on
    other.locator('[data-testid="stDataFrame"] canvas').first.wait_for()
    page.troubles = [t for t in page.troubles if "403" not in t]  # asked for above


def test_plotly_is_run_before_any_figure_asks_for_it(page, address):
    open_view(page, address, "runs")
    page.locator('[data-testid="stDataFrame"] canvas').first.wait_for()
    page.wait_for_function(RUN)
    assert page.locator(".js-plotly-plot").count() == 0
    assert page.evaluate(LOADED).count("PlotlyChart") == 1


def test_an_overview_loads_nothing_that_colours_code(page, address):
    open_view(page, address, "overview", run="ssd")
    page.locator(".st-key-figure-losses .main-svg").first.wait_for()
    page.get_by_role("button", name="Copy mpdiag").first.wait_for()
    assert "StreamlitSyntaxHighlighter" not in page.evaluate(LOADED)


@pytest.mark.parametrize("clipboard", [True, False])
def test_a_command_is_copied_by_its_button(page, address, clipboard):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_view(page, address, "overview", run="ssd")
    button = page.get_by_role("button", name="Copy mpdiag").first
    button.wait_for()
    page.evaluate("window.board = navigator.clipboard")
    if not clipboard:  # as on a page from another machine
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button.focus()
    page.keyboard.press("Enter")
    command = button.get_attribute("aria-label").removeprefix("Copy ")
    page.get_by_role("button", name=f"Copy {command}").filter(has_text="Copied").wait_for()
    assert command.startswith("mpdiag ")
    assert page.evaluate("board.readText()") == command
