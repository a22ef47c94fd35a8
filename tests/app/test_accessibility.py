"""Every page in a browser, without an error and with nothing grave that axe-core finds.

Each page is opened once and looked at in light, in dark and as wide as a phone.
"""

from __future__ import annotations

import shutil

import axe_checks
import pytest
from browsing import at_rest, open_view

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")

PAGES = (
    ("overview", {"run": "ssd"}),
    ("overview", {"run": "ssd-fp16-plan"}),
    ("overview", {"run": "gpu-sample"}),
    ("runs", {}),
    ("verdict", {"run": "ssd"}),
    ("gradients", {"run": "ssd"}),
    ("layers", {"run": "ssd"}),
    ("layers", {"run": "ssd", "layer": "trunk.1"}),
    ("layers", {"run": "ssd", "tab": "One+step"}),
    ("updates", {"run": "ssd"}),
    ("operations", {"run": "digits"}),
    ("tensor_cores", {"run": "ssd"}),
    ("tensor_cores", {"run": "digits"}),
    ("tensor_cores", {"run": "gpu-sample"}),
    ("training", {"run": "ssd"}),
    ("training", {"run": "ssd", "tab": "Loss-scale+replay"}),
    ("compare", {"run": "ssd"}),
)
FOREIGN = (
    # Streamlit's colours of code, which no theme sets.
    ("color-contrast", '[data-testid="stCode"]'),
)
DESK, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
SIDEWAYS = "document.querySelector('[data-testid=\"stMain\"]').scrollWidth - innerWidth"


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("accessible") / "runs"
    for name in ("ssd", "ssd-fp16-plan", "digits", "gpu-sample"):
        shutil.copytree(root / "sample_runs" / name, folder / name)
    return folder


def test_every_page_in_light_in_dark_and_on_a_phone(page, address):
    axe, found = axe_checks.script(), []
    for view, query in PAGES:
        page.set_viewport_size(DESK)
        page.emulate_media(color_scheme="light")
        open_view(page, address, view, **query)
        if view in ("gradients", "layers", "updates", "operations", "compare"):
            page.locator(".js-plotly-plot .main-svg >> visible=true").first.wait_for()
        at_rest(page)
        assert page.locator('[data-testid="stException"]').count() == 0
        page.evaluate(axe)
        found += axe_checks.grave_findings(page, foreign=FOREIGN)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(300)  # Streamlit draws its colours anew
        found += axe_checks.grave_findings(page, "color-contrast", foreign=FOREIGN)
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(300)
        rules = ("scrollable-region-focusable", "button-name", "aria-hidden-focus", "label")
        found += axe_checks.grave_findings(page, *rules, foreign=FOREIGN)
        assert page.evaluate(SIDEWAYS) <= 0, f"{view} scrolls sideways on a phone"
    assert not found, "\n".join(found)


def test_an_opened_receipt(page, address):
    open_view(page, address, "updates", run="ssd")
    page.get_by_role("button", name="Receipt").first.click()
    page.get_by_role("button", name="Figure (SVG)").first.wait_for()
    page.evaluate(axe_checks.script())
    assert not axe_checks.grave_findings(page, foreign=FOREIGN)
