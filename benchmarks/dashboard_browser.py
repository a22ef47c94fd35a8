"""How soon the heat map follows the loss-scale slider in a browser, beside a bare Streamlit page.

    python benchmarks/dashboard_browser.py [--runs RUNS] [--run ssd] [--times 10]

From the key that moves the slider to the figure redrawn, against the same on a page that has a slider
and one line of text: the difference is what the dashboard adds. Needs Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.installation.bundled import sample_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

BARE = """
import streamlit as st
st.write("moved to", st.slider("Loss scale", -10, 24, 6))
"""
HEAT = ".st-key-figure-heat-map"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=sample_runs())
    parser.add_argument("--run", default="ssd")
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "bare.py"
        page.write_text(BARE)
        bare = measured(
            ["-m", "streamlit", "run", str(page), "--server.headless=true"],
            "--server.port",
            "",
            "document.querySelector('[data-testid=\"stMarkdown\"]').innerText",
            options.times,
        )
    ours = measured(
        ["-m", "mpdiag", "dashboard", str(options.runs), "--no-browser"],
        "--port",
        f"gradients?run={options.run}&scale=6",
        f"document.querySelector('{HEAT} .js-plotly-plot').layout.shapes[0].x0",
        options.times,
    )
    print(f"bare Streamlit page: {bare:.2f} s")
    print(f"heat map of {options.run}: {ours:.2f} s, {ours - bare:+.2f} s, {ours / bare:.1f} times")


def measured(command: list[str], port_option: str, path: str, state: str, times: int) -> float:
    """Median seconds from a key on the slider to another state of the page.

    Args:
        command: Starts a server, for this Python.
        port_option: The option that names its port.
        path: The page.
        state: JavaScript: what changes when the slider's effect is seen.
        times: How often to move it.
    """
    from playwright.sync_api import sync_playwright

    with served(command, port_option) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page: Any = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{address}/{path}")
        slider = page.get_by_role("slider").first
        slider.wait_for(timeout=120_000)
        page.wait_for_function(f"() => {{ try {{ return {state} !== undefined }} catch {{}} }}")
        page.wait_for_timeout(2000)
        took = []
        for i in range(times):
            before = page.evaluate(state)
            began = time.perf_counter()
            slider.press("ArrowLeft" if i % 2 else "ArrowRight")
            page.wait_for_function(f"before => {state} !== before", arg=before)
            took.append(time.perf_counter() - began)
            page.wait_for_timeout(500)
        browser.close()
    return statistics.median(took)


@contextmanager
def served(command: list[str], port_option: str) -> Iterator[str]:
    """A server that answers, at an address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, *command, port_option, str(port)],
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
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
