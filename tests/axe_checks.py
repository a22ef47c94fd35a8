"""What axe-core finds wrong on a page in a browser: contrast, names, order, focus.

axe-core comes with the package axe-playwright-python, which ships the script of axe's npm package.
"""

import pytest

GRAVE = ("serious", "critical")
DRAWN = ".js-plotly-plot .main-svg"
"""What Plotly draws: marks without words of their own, whose figure has a name and a caption."""
_RUN = """async ([rules, foreign, grave]) => {
    const asked = {resultTypes: ["violations"], ...(rules.length ? {runOnly: rules} : {})};
    const theirs = (rule, target) => foreign.some(([about, selector]) => about == rule
        && document.querySelector(target[0])?.closest(selector));
    const found = await axe.run({exclude: [DRAWN]}, asked);
    return found.violations.filter(v => grave.includes(v.impact)).flatMap(v => v.nodes
        .filter(node => !theirs(v.id, node.target))
        .map(node => `${v.id}: ${node.html.slice(0, 160)}: ${node.failureSummary}`));
}""".replace("DRAWN", f"'{DRAWN}'")


def script() -> str:
    """axe-core, to be evaluated in a page once it is loaded."""
    reason = "needs axe-core, of axe-playwright-python"
    return pytest.importorskip("axe_playwright_python.base", reason=reason).AXE_SCRIPT


def grave_findings(page, *rules, foreign=()) -> list[str]:
    """Serious and critical findings of axe on the page that is shown.

    Args:
        page: Where ``script`` was evaluated.
        rules: The only ones to check; none for all.
        foreign: Rule and selector of elements that are not ours.
    """
    return page.evaluate(_RUN, [list(rules), [list(pair) for pair in foreign], list(GRAVE)])
