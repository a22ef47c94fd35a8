"""The dashboard's pages in a browser: opening one, and waiting until it is whole."""

from __future__ import annotations

import shutil

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE = 60_000


def open_view(page, address, view, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    page.goto(f"{address}/{view}?{words}")
    page.locator('[data-testid="stHeading"]').first.wait_for()


def at_rest(page):
    page.wait_for_function('!document.querySelector(\'[data-testid="stApp"] [data-stale="true"]\')')
