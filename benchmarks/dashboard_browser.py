"""How soon the dashboard shows a run in a browser, and follows the loss-scale slider.

    python benchmarks/dashboard_browser.py [--runs RUNS] [--run ssd] [--rounds 3] [--times 10]

Beside a bare Streamlit page with a slider and one line of text, by turns, so that a machine that slows
down slows both. The first view: from the address entered to the overview drawn, its figures included,
in a new browser, of a server that has just begun to answer. The slider: from the key that moves it to
the heat map redrawn, and to the last of the four figures. The difference from the bare page is what
the dashboard adds. Needs Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.installation.bundled import sample_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

BARE = """
import streamlit as st
st.write("moved to", st.slider("Loss scale", -10, 24, 6))
"""
TEXT = "document.querySelector('[data-testid=\"stMarkdown\"]')?.innerText"
DRAWN = """(() => {
    const charts = [...document.querySelectorAll('[data-testid="stPlotlyChart"]')];
    return charts.length > 1 && charts.every((chart) => chart.querySelector('.main-svg'));
})()"""
HEAT = ".st-key-figure-heat-map"
FIGURES = (
    HEAT,
    *(f".st-key-figure-{key}" for key in ("layer-scales", "consequences")),
)
"""What the slider moves; marks move in three of them, bars in the other one."""


@dataclass(frozen=True)
class Server:
    """How a page is served and read.

    Attributes:
        command: Starts it, for this Python.
        port: The option that names its port.
        first: The address of its first view.
        seen: JavaScript: true once that is drawn.
        sliding: The address of the page with a slider.
        states: JavaScript: what changes when the slider's effects are seen, the first one first.
    """

    command: list[str]
    port: str
    first: str
    seen: str
    sliding: str
    states: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=sample_runs())
    parser.add_argument("--run", default="ssd")
    parser.add_argument("--rounds", type=int, default=3, help="first views")
    parser.add_argument("--times", type=int, default=10, help="moves of the slider")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "bare.py"
        page.write_text(BARE)
        run = ["-m", "streamlit", "run", str(page), "--server.headless=true"]
        bare = Server(run, "--server.port", "", f"!!{TEXT}", "", (TEXT,))
        ours = Server(
            ["-m", "mpdiag", "dashboard", str(options.runs), "--no-browser"],
            "--port",
            f"overview?run={options.run}",
            DRAWN,
            f"gradients?run={options.run}&scale=0",
            tuple(_figure_state(key) for key in FIGURES),
        )
        first = [(first_view(bare), first_view(ours)) for _ in range(options.rounds)]
        plain, heat, all_four = moves(bare, ours, options.times)
    views = [statistics.median(column) for column in zip(*first, strict=True)]
    figures = {
        "first_view_s": _beside(*views),
        "slider_heat_map_s": _beside(plain, heat),
        "slider_all_figures_s": _beside(plain, all_four),
    }
    for name, row in figures.items():
        print(f"{name:>22}: {row}")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        told = {"date": str(date.today()), **machine, "load": round(os.getloadavg()[0], 1)}
        document = {"machine": told, "run": options.run, **figures}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _beside(bare: float, ours: float) -> dict[str, float]:
    figures = {"bare": bare, "dashboard": ours, "more": ours - bare, "ratio": ours / bare}
    return {name: round(value, 3) for name, value in figures.items()}


def _figure_state(key: str) -> str:
    """JavaScript: marks and bars of a figure, as text."""
    return f"""(() => {{
        const figure = document.querySelector('{key} .js-plotly-plot');
        const bars = figure.data[0].type === "bar" ? figure.data[0].x : 0;
        return JSON.stringify([figure.layout.shapes, bars]);
    }})()"""


def first_view(server: Server) -> float:
    """Seconds from the address entered to the view drawn, both server and browser just started."""
    with served(server) as address, browsed() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        began = time.perf_counter()
        page.goto(f"{address}/{server.first}", wait_until="commit")
        page.wait_for_function(f"() => {server.seen}", timeout=120_000)
        return time.perf_counter() - began


def moves(bare: Server, ours: Server, times: int) -> tuple[float, float, float]:
    """Median seconds from a key on the slider: the bare page's text, the first figure, the last."""
    took: list[list[float]] = [[], [], []]
    with served(bare) as first, served(ours) as second, browsed() as browser:
        pages = [_ready(browser, *pair) for pair in ((first, bare), (second, ours))]
        for i in range(times + 1):
            seen = [
                _move(page, server, "ArrowLeft" if i % 2 else "ArrowRight")
                for page, server in zip(pages, (bare, ours), strict=True)
            ]
            if i:  # the first one warms up
                for column, value in zip(took, (seen[0][0], seen[1][0], max(seen[1])), strict=True):
                    column.append(value)
    bare_s, heat_s, all_s = map(statistics.median, took)
    return bare_s, heat_s, all_s


def _ready(browser: Any, address: str, server: Server) -> Any:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{address}/{server.sliding}")
    page.get_by_role("slider").first.wait_for(timeout=120_000)
    for state in server.states:
        page.wait_for_function(
            f"() => {{ try {{ return {state} !== undefined }} catch {{}} }}", timeout=120_000
        )
    page.wait_for_timeout(1500)
    return page


WATCH = """states => {
    const read = state => { try { return eval(state) } catch {} };
    const before = states.map(read), seen = states.map(() => null);
    window.seen = null;
    document.addEventListener("keydown", (event) => {
        const look = (now) => {
            states.forEach((state, i) => {
                const new_ = read(state);
                if (seen[i] === null && new_ !== undefined && new_ !== before[i])
                    seen[i] = (now - event.timeStamp) / 1000;
            });
            if (seen.every((time) => time !== null)) window.seen = seen;
            else requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
    }, { once: true, capture: true });
}"""
"""JavaScript: from a key on, look at each frame what has changed."""


def _move(page: Any, server: Server, key: str) -> list[float]:
    """Seconds from a key on the slider to the frame in which each of its effects is there.

    Taken by the page itself: asked for from here, each would add the way there and back.
    """
    page.bring_to_front()
    page.evaluate(WATCH, list(server.states))
    page.get_by_role("slider").first.press(key)
    page.wait_for_function("() => window.seen", timeout=30_000)
    took: list[float] = page.evaluate("window.seen")
    page.wait_for_timeout(400)
    return took


@contextmanager
def browsed() -> Iterator[Any]:
    """A browser that has seen nothing yet."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(server: Server) -> Iterator[str]:
    """A server that answers, at an address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *server.command, server.port, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://localhost:{port}"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
