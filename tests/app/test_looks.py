"""Every page in a browser, in light, in dark and as wide as a phone.

No error, nothing grave that axe-core finds, and no words of a figure over others or beyond its edge.
Each page is opened once.
"""

import shutil
from pathlib import Path

import axe_checks
import pytest
import torch
from audited_trainings import BF16, model, train
from browsing import at_rest, open_view

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")

PAGES = [
    line.split("\t")
    for line in Path(__file__).with_name("looked_at.tsv").read_text(encoding="utf-8").splitlines()
]
"""Views, and the words of their links."""
FOREIGN = (
    # Streamlit's colours of code, which no theme sets.
    ("color-contrast", '[data-testid="stCode"]'),
)
DRAWS = ("gradients", "layers", "updates", "operations", "formats", "compare")
"""Views whose first figure is waited for."""
DESK, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
SIDEWAYS = "document.querySelector('[data-testid=\"stMain\"]').scrollWidth - innerWidth"
WORDS = Path(__file__).with_name("words.js").read_text(encoding="utf-8")
"""Of each figure its name, its edges and its words, each with left, right, top and bottom."""


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("accessible") / "runs"
    for name in ("ssd", "ssd-fp16-plan", "digits", "gpu-sample"):
        shutil.copytree(root / "sample_runs" / name, folder / name)
    weights = model(BF16)
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-2)
    train(weights, optimizer, folder / "bf16", operations=1, blocks=True)
    return folder


def faults(figures):
    """Words that lie over others or beyond their figure, by more than a pixel."""
    for key, (left, right, top, bottom), words in figures:
        for place, (said, box) in enumerate(words):
            beyond = max(left - box[0], box[1] - right, top - box[2], box[3] - bottom)
            if beyond > 1:
                yield f"{key}: {said} is cut by {beyond:.1f} pixels"
            for other, its in words[place + 1 :]:
                across = min(box[1], its[1]) - max(box[0], its[0])
                down = min(box[3], its[3]) - max(box[2], its[2])
                if min(across, down) > 1:
                    yield f"{key}: {said} lies over {other}, {across:.1f} × {down:.1f} pixels"


def test_words_that_lie_over_others_or_are_cut_are_found():
    edges, here = (0, 100, 0, 50), (10, 40, 5, 15)
    assert not list(faults([["a", edges, [["tick 1", here], ["tick 2", (41, 60, 5, 15)]]]]))
    over = [["a", edges, [["tick 1", here], ["legend x", (30, 60, 10, 20)]]]]
    assert list(faults(over)) == ["a: tick 1 lies over legend x, 10.0 × 5.0 pixels"]
    assert list(faults([["a", edges, [["mark ∞", (90, 104, 0, 9)]]]])) == [
        "a: mark ∞ is cut by 4.0 pixels"
    ]


@pytest.mark.long
def test_every_page_in_light_in_dark_and_on_a_phone(page, address):
    axe, found, kinds = axe_checks.script(), [], set()

    def look_at_words(view):
        figures = page.evaluate(WORDS)
        kinds.update(said.split()[0] for _, _, words in figures for said, _ in words)
        found.extend(f"{view}: {fault}" for fault in faults(figures))

    for view, link in PAGES:
        query = dict(word.split("=") for word in link.split())
        page.set_viewport_size(DESK)
        page.emulate_media(color_scheme="light")
        open_view(page, address, view, **query)
        if view in DRAWS and (view != "layers" or len(query) > 1):  # all of them are a table
            page.locator(".js-plotly-plot .main-svg >> visible=true").first.wait_for()
        at_rest(page)
        assert page.locator('[data-testid="stException"]').count() == 0
        look_at_words(f"{view} {query} at a desk")
        page.evaluate(axe)
        found += axe_checks.grave_findings(page, foreign=FOREIGN)
        page.emulate_media(color_scheme="dark")
        for patience in (300, 3000):  # Streamlit draws its colours again, on a busy machine slowly
            page.wait_for_timeout(patience)
            at_rest(page)
            dark = axe_checks.grave_findings(page, "color-contrast", foreign=FOREIGN)
            if not dark:
                break
        found += dark
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(300)  # Plotly lays its figures out again
        at_rest(page)
        rules = ("scrollable-region-focusable", "button-name", "aria-hidden-focus", "label")
        found += axe_checks.grave_findings(page, *rules, foreign=FOREIGN)
        look_at_words(f"{view} {query} on a phone")
        assert page.evaluate(SIDEWAYS) <= 0, f"{view} scrolls sideways on a phone"
    assert kinds == {"legend", "title", "tick", "mark"}
    assert not found, "\n".join(found)


@pytest.mark.long
def test_an_opened_receipt(page, address):
    open_view(page, address, "updates", run="ssd")
    page.get_by_role("button", name="Receipt").first.click()
    page.get_by_role("button", name="Figure (SVG)").first.wait_for()
    page.evaluate(axe_checks.script())
    assert not axe_checks.grave_findings(page, foreign=FOREIGN)
