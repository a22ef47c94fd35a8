"""The reports as a browser shows them: on a phone, on paper, with what is folded opened."""

import axe_checks
import made_runs as hand
import pytest
from browsing import PATIENCE, browser

from mpdiag.reports.documents.write import write_report
from mpdiag.tensorcores.reports.trace_report import write_trace_report

__all__ = ["browser"]
pytestmark = pytest.mark.long
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1400, "height": 900}
TALLEST = 3000
"""Pixels of a trace's report on a desk, before anything is opened."""
LEGENDS_LIE_APART = """() => {
    const boxes = (figure, part) =>
        [...figure.querySelectorAll(part)].map((p) => p.getBoundingClientRect());
    const figures = [...document.querySelectorAll('.js-plotly-plot')]
        .filter((figure) => boxes(figure, '.legend').length > 0);
    return figures.length > 1 && figures.every((figure) => {
        const [legend, whole] = [boxes(figure, '.legend')[0], figure.getBoundingClientRect()];
        const plots = boxes(figure, '.nsewdrag, .xaxislayer-above').map((p) => p.bottom);
        return legend && legend.height > 0 && Math.max(...plots) <= legend.top &&
            legend.bottom <= whole.bottom + 1;
    });
}"""
"""No legend lies on its plot, once Plotly has measured its words and moved what is beside them."""


@pytest.fixture(scope="module")
def pages(root, tmp_path_factory):
    """A run's report, a trace's, and one of hostile names, each as an address."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = hand.write_run(folder / "hostile run")
    written = {
        "run": write_report(root / "sample_runs" / "ssd", folder / "run.html"),
        "trace": write_trace_report(
            root / "sample_runs" / "gpu-sample" / "trace.json.gz", folder / "trace.html"
        ),
        "hostile": write_report(hostile, folder / "hostile.html"),
    }
    return {name: path.as_uri() for name, path in written.items()}


@pytest.fixture
def page(browser):
    opened = browser.new_page(viewport=DESK)
    opened.set_default_timeout(PATIENCE)
    wrong = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.close()
    assert wrong == []


def opened(page, address):
    page.goto(address)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    return page


def size(page, side):
    return page.evaluate(f"document.documentElement.scroll{side}")


@pytest.mark.parametrize("name", ["run", "trace", "hostile"])
def test_no_page_scrolls_sideways_on_a_phone_and_no_legend_lies_on_a_plot(page, pages, name):
    page.set_viewport_size(PHONE)
    opened(page, pages[name])
    assert size(page, "Width") == PHONE["width"]
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.wait_for_function(
        "[...document.querySelectorAll('.figure')].every((f) => f.offsetParent === null || f.data)"
    )
    assert size(page, "Width") == PHONE["width"]
    assert page.locator(".modebar").count() == 0  # it would lie on the legend
    assert page.evaluate("window.hacked") is None
    page.wait_for_function(LEGENDS_LIE_APART)


def test_a_trace_s_report_is_short_until_something_is_opened(page, pages):
    opened(page, pages["trace"])
    assert size(page, "Height") < TALLEST
    assert page.locator("table:visible").count() == 0
    fold = page.locator("details.fold", has_text="TF32 off").first
    fold.locator("summary").click()
    assert fold.locator("table").is_visible()


def test_the_switch_shows_the_gradients_before_and_after_the_loss_scale(page, pages):
    opened(page, pages["run"])
    panes = page.locator(".pane")
    assert [panes.nth(i).is_visible() for i in (0, 1)] == [True, False]
    page.get_by_label("At a loss scale of 64").check()
    assert [panes.nth(i).is_visible() for i in (0, 1)] == [False, True]
    panes.nth(1).locator(".main-svg").first.wait_for()
    lines = "document.querySelectorAll('.pane .figure')[{}].layout.shapes[0].x0"
    before, after = (page.evaluate(lines.format(i)) for i in (0, 1))
    assert before - after == 6  # 64 = 2^6


def test_on_paper_everything_is_open_and_no_figure_is_wider_than_it(page, pages):
    opened(page, pages["run"])
    figures = page.locator(".figure").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".figure.js-plotly-plot").count() == figures == 6
    assert page.locator("details.fold:not([open])").count() == 0
    widths = page.evaluate(
        "[...document.querySelectorAll('.figure .main-svg')].map((s) => s.clientWidth)"
    )
    assert max(widths) <= 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details.fold[open]").count() == 0
    assert [page.locator(".pane").nth(i).is_visible() for i in (0, 1)] == [True, False]


@pytest.mark.parametrize("name", ["run", "trace"])
def test_nothing_grave_is_in_the_way_of_those_who_see_or_hear_little(page, pages, name):
    page.emulate_media(color_scheme="light")
    page.goto(pages[name])
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.evaluate(axe_checks.script())
    found = axe_checks.grave_findings(page)
    page.emulate_media(color_scheme="dark")
    found += axe_checks.grave_findings(page, "color-contrast")
    page.set_viewport_size(PHONE)
    found += axe_checks.grave_findings(page)
    assert not found, "\n".join(found)
