"""The pictures of the README, taken from the dashboard on the sample runs.

    python docs/screenshots.py [docs]

needs Chromium, Playwright and Pillow, and writes ``dashboard.png``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from mpdiag.bundled import sample_runs
from mpdiag.dashboard import FOLDER_VARIABLE, server_command

PAGES = {"dashboard.png": "gradients?run=ssd"}
SIZE = {"width": 1360, "height": 1560}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, FOLDER_VARIABLE: os.path.relpath(sample_runs())}
    server = subprocess.Popen(server_command(port, browser=False), env=environment)
    try:
        wait_for(f"http://localhost:{port}/_stcore/health")
        for name, page in PAGES.items():
            take(f"http://localhost:{port}/{page}", folder / name)
            print(folder / name, (folder / name).stat().st_size, "bytes")
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


def take(address: str, path: Path) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(address)
        page.locator(".js-plotly-plot .main-svg").nth(2).wait_for(timeout=60_000)
        page.wait_for_timeout(4000)  # figures fade in
        page.screenshot(path=str(path))
        browser.close()
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
