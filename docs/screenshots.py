"""Pictures of the dashboard, taken from the sample runs.

    python docs/screenshots.py [docs]                     those of the README
    python docs/screenshots.py --all /tmp/shots [--runs RUNS] [--run NAME ...]
                                                           every view, light and dark, to look at

needs Chromium, Playwright and Pillow.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpdiag.commands.dashboard import FOLDER_VARIABLE, server_command
from mpdiag.installation.bundled import sample_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = {
    "overview.png": ("overview?run=ssd", 2, 800),
    "runs.png": ("runs", 0, 620),
    "dashboard.png": ("gradients?run=ssd", 4, 1560),
    "operations.png": ("operations?run=digits", 2, 1560),
}
"""Of each picture: its page, how many figures must be drawn on it, the height of the window."""
VIEWS = (
    *(
        "runs",
        "overview",
        "verdict",
        "precision",
        "gradients",
        "layers",
        "updates",
        "operations",
        "formats",
    ),
    *(
        "tensor_cores",
        "training",
        "training?tab=Loss-scale+replay",
        "layers?layer=trunk.1",
        "compare",
    ),
)
WIDTH, HEIGHT = 1400, 1560


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    parser.add_argument("--all", action="store_true", help="every view, light and dark")
    parser.add_argument("--runs", type=Path, default=None, help="default: the sample runs")
    parser.add_argument(
        "--run", nargs="*", default=["ssd", "gpu-sample"], help="with --all: of these runs"
    )
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = options.runs or Path(os.path.relpath(sample_runs()))
    with served(runs) as address:
        if options.all:
            for run in options.run:
                for view in VIEWS:
                    for scheme in ("light", "dark"):
                        words = re.sub(r"\?\w+=|\+", "-", view)
                        name = f"{run}-{words}-{scheme}.png"
                        page = f"{view}{'&' if '?' in view else '?'}run={run}"
                        path = options.folder / name
                        take(f"{address}/{page}", path, scheme, width=options.width, whole=True)
                        print(path)
            return
        for name, (page, figures, height) in PAGES.items():
            path = options.folder / name
            take(f"{address}/{page}", path, "light", figures=figures, height=height)
            print(options.folder / name, (options.folder / name).stat().st_size, "bytes")


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The dashboard on a folder of runs, at an address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, FOLDER_VARIABLE: str(runs)}
    server = subprocess.Popen(server_command(port, browser=False), env=environment)
    try:
        wait_for(f"http://localhost:{port}/_stcore/health")
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(address, timeout=2).close()  # noqa: S310 - localhost
        except OSError:
            time.sleep(0.1)
        else:
            return
    sys.exit(f"{address} does not answer")


def take(
    address: str,
    path: Path,
    scheme: Any,
    *,
    width: int = WIDTH,
    height: int = HEIGHT,
    whole: bool = False,
    figures: int = 0,
) -> None:
    """One picture: of a window, or of the whole page."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        size = {"width": width, "height": height}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.goto(address)
        page.locator('[data-testid="stHeading"]').first.wait_for(timeout=60_000)
        if figures:
            page.locator(".js-plotly-plot .main-svg").nth(figures - 1).wait_for(timeout=60_000)
        page.wait_for_timeout(4000)  # figures fade in
        if whole:
            tall = page.evaluate("document.querySelector('[data-testid=\"stMain\"]').scrollHeight")
            page.set_viewport_size({"width": width, "height": max(600, min(tall + 20, 6000))})
            page.wait_for_timeout(1500)
        page.screenshot(path=str(path))
        browser.close()
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
