"""What a person sees: the dashboard and the report in a real browser.

Debian's Chromium, driven by Playwright; skipped where either is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import made_runs as hand
import pytest

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import percent
from mpdiag.numerics.formats import FP16
from mpdiag.reports.documents.write import write_report
from mpdiag.reports.views.gradients.frame import scale_frame, summary

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
PATIENCE = 60_000

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


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """A folder with two sample runs of one model, a hostile one and a damaged one."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    for name in ("ssd", "ssd-2"):
        shutil.copytree(root / "sample_runs" / name, folder / name)
    hand.write_run(folder / "hostile")
    (folder / "torn").mkdir()
    (folder / "torn" / "meta.json").write_text('{"schema_')
    return folder


@pytest.fixture(scope="module")
def address(runs, root):
    """The dashboard, served as a user serves it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mpdiag", "dashboard", str(runs), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    server = subprocess.Popen(
        [*command, "--no-browser"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield f"http://localhost:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page that notes each error, and each request that leaves this machine."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda message: _note(page, message))
    page.on("request", lambda request: _leaves(page, request.url))
    yield page
    context.close()
    assert page.troubles == []


def _note(page, message):
    # Streamlit asks for its health below each page's path first, and then where it is.
    if message.type == "error" and "/_stcore/" not in message.location.get("url", ""):
        page.troubles.append(message.text)


def _leaves(page, url):
    if not url.startswith(("http://localhost:", "data:", "blob:", "file:", "ws://localhost:")):
        page.troubles.append(f"asked for {url}")


def metric(page, label):
    """The value on the card of that label, once the page is at rest."""
    card = page.locator('[data-testid="stMetric"]').filter(has_text=label)
    return card.locator('[data-testid="stMetricValue"]')


def open_view(page, address, view, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    page.goto(f"{address}/{view}?{words}")
    page.locator('[data-testid="stHeading"]').first.wait_for()


def at_rest(page):
    page.wait_for_function('!document.querySelector(\'[data-testid="stApp"] [data-stale="true"]\')')


VIEWS = ("", "verdict", "gradients", "updates", "operations", "tensor_cores", "training", "compare")


@pytest.mark.parametrize("run", ["ssd", "hostile"])
def test_every_view_without_an_error(page, address, run):
    for view in VIEWS:
        open_view(page, address, view, run=run)
        if view == "compare" and run == "hostile":
            page.get_by_text("No other recorded run here is of the same model").wait_for()
        elif view in ("gradients", "updates", "operations", "compare"):
            page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert page.locator('[data-testid="stException"]').count() == 0
        assert page.evaluate("window.hacked") is None
        if view == "gradients" and run == "hostile":
            page.locator(".js-plotly-plot").filter(has_text='window.hacked=1">').first.wait_for()


def test_the_slider_moves_the_numbers_and_its_link_reopens_them(page, address, runs):
    layers = analyze(runs / "ssd").loss_scale.late

    def expected(exponent):
        return percent(summary(scale_frame(layers, FP16, exponent)).lost_share)

    open_view(page, address, "gradients", run="ssd", scale=6)
    value = metric(page, "Values lost to 0")
    playwright.expect(value).to_have_text(expected(6), timeout=PATIENCE)
    slider = page.get_by_role("slider").first
    for exponent in (5, 4):
        slider.press("ArrowLeft")
        playwright.expect(value).to_have_text(expected(exponent), timeout=PATIENCE)
    assert expected(4) != expected(6)
    page.wait_for_url("**scale=4**")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    playwright.expect(metric(page, "Values lost to 0")).to_have_text(expected(4), timeout=PATIENCE)
    assert page.url == link


def test_a_row_of_the_list_chooses_its_run(page, address):
    open_view(page, address, "", run="ssd")
    caption = page.locator('[data-testid="stCaptionContainer"]')
    caption.filter(has_text="Detector").first.wait_for()
    table = page.locator('[data-testid="stDataFrame"]')
    table.locator("canvas").first.wait_for()
    at_rest(page)
    row = 35  # pixels of a line, of the heading too; the third run is the hostile one
    table.click(position={"x": 16, "y": 3.5 * row})
    caption.filter(has_text="hostile").first.wait_for()
    page.wait_for_url("**run=hostile**")
    assert page.get_by_role("combobox").first.get_attribute("aria-label") is not None


def test_a_damaged_run_shows_its_sentence_and_the_others_open(page, address):
    open_view(page, address, "verdict", run="ssd")
    page.get_by_text("with a loss scale of").first.wait_for()
    page.goto(f"{address}/verdict?run=torn")
    page.get_by_text("meta.json is damaged").first.wait_for()


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
        steps = int(before.split(" of ")[0].rsplit(" ", 1)[1])
        page.wait_for_function(
            """steps => [...document.querySelectorAll('[data-testid="stCaptionContainer"]')].some(
                e => Number((e.innerText.match(/(\\d+) of \\d+ steps recorded/) || [])[1]) > steps)""",
            arg=steps,
        )
    finally:
        trainer.kill()
        trainer.wait()


def test_the_report_draws_itself_from_a_file(page, runs, tmp_path):
    for name in ("ssd", "hostile"):
        path = write_report(runs / name, tmp_path / f"{name}.html")
        page.goto(path.as_uri())
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        unfold = (
            "document.querySelectorAll('details.fold').forEach((part) => { part.open = true; })"
        )
        page.evaluate(unfold)  # a figure is drawn once it can be seen
        page.wait_for_function(
            "[...document.querySelectorAll('.figure')]"
            ".every((figure) => figure.offsetParent === null || figure.data)"
        )
        seen = page.locator(".figure").count() - page.locator(".pane[hidden] .figure").count()
        assert page.locator(".figure.js-plotly-plot").count() == seen >= 6
        assert page.evaluate("window.hacked") is None
