"""A browser for tests, and the dashboard's pages in it: opening one, waiting until it is whole."""

import shutil

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE = 60_000


def open_view(page, address, view, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    page.goto(f"{address}/{view}?{words}")
    page.locator('[data-testid="stHeading"]').first.wait_for()


def at_rest(page):
    """Wait until the page's script has ended, its old elements are gone and none fades in or out.

    An element that fades is paler than its colour, and axe-core measures what is shown.
    """
    page.wait_for_function("""() => {
        const app = document.querySelector('[data-testid="stApp"]');
        const moves = a => a.playState == "running"
            && a.effect.getComputedTiming().endTime != Infinity;
        return app.dataset.testScriptState == "notRunning"
            && !app.querySelector('[data-stale="true"]')
            && !document.getAnimations().some(moves);
    }""")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
