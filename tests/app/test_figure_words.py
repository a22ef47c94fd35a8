"""No words of a figure lie over others or beyond its edge, at a desk and on a phone."""

from __future__ import annotations

import shutil

import pytest
from browsing import at_rest, open_view

pytest.importorskip("streamlit", reason="needs Streamlit, of the extra `app`")

PAGES = (
    ("overview", {"run": "ssd"}),
    ("gradients", {"run": "ssd"}),
    ("layers", {"run": "ssd", "layer": "trunk.1"}),
    ("layers", {"run": "ssd", "tab": "One+step"}),
    ("updates", {"run": "ssd"}),
    ("operations", {"run": "digits"}),
    ("tensor_cores", {"run": "gpu-sample"}),
    ("training", {"run": "ssd"}),
    ("training", {"run": "ssd", "tab": "Loss-scale+replay"}),
    ("compare", {"run": "ssd"}),
)
"""All that draw figures; what ``overview`` shows of a trace ``tensor_cores`` shows, too."""
DESK, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
WORDS = """() => {
    const kinds = {
        legend: ".legend .traces text",
        title: ".infolayer [class*='title'] text",
        tick: ".xtick text, .ytick text",
        mark: ".annotation text.annotation-text",
    }
    const plots = [...document.querySelectorAll(".js-plotly-plot")].filter(p => p.checkVisibility())
    return plots.map((plot) => {
        const { className } = plot.closest('[class*="st-key-figure"]')
        const key = className.match(/st-key-(figure-[\\w-]+)/)[1]
        const box = (node) => {
            const { left, right, top, bottom } = node.getBoundingClientRect()
            // A line is half as tall again as its letters.
            const rest = 0.24 * parseFloat(getComputedStyle(node).fontSize)
            return [left, right, top + rest, bottom - rest]
        }
        const words = Object.entries(kinds).flatMap(([kind, selector]) =>
            [...plot.querySelectorAll(selector)]
                .filter(n => n.textContent.trim() && n.checkVisibility({opacityProperty: true,
                                                                        visibilityProperty: true}))
                .map(n => [`${kind} ${n.textContent}`, box(n)]))
        return [key, box(plot), words]
    })
}"""
"""Of each figure its name, its edges and its words, each with left, right, top and bottom."""


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("words") / "runs"
    for name in ("ssd", "ssd-fp16-plan", "digits", "gpu-sample"):
        shutil.copytree(root / "sample_runs" / name, folder / name)
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


def test_no_words_of_any_figure_meet_at_a_desk_or_on_a_phone(page, address):
    found, kinds = [], set()
    for view, query in PAGES:
        page.set_viewport_size(DESK)
        open_view(page, address, view, **query)
        page.locator(".js-plotly-plot .main-svg >> visible=true").first.wait_for()
        at_rest(page)
        for size in (DESK, PHONE):
            page.set_viewport_size(size)
            page.wait_for_timeout(300)  # Plotly lays its figures out anew
            figures = page.evaluate(WORDS)
            assert figures
            kinds |= {said.split()[0] for _, _, words in figures for said, _ in words}
            found += [f"{view} {query} {size['width']}: {fault}" for fault in faults(figures)]
    assert kinds == {"legend", "title", "tick", "mark"}
    assert not found, "\n".join(found)
