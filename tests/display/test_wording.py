"""Names and numbers as people read them."""

import ast

from mpdiag.display.wording import counted, in_markdown, percent


def test_counts():
    expected = {
        (0, "layer"): "0 layers", (1, "layer"): "1 layer", (1234, "layer"): "1,234 layers",
        (1, "operation or module", "operations or modules"): "1 operation or module",
        (2, "operation or module", "operations or modules"): "2 operations or modules",
    }  # fmt: skip
    assert {asked: counted(*asked) for asked in expected} == expected


def test_shares():
    expected = {
        (0.0,): "0 %", (1e-5,): "< 0.01 %", (0.1234,): "12.34 %", (float("nan"),): "–",
        (0.9999,): "99.99 %", (0.99999,): "> 99.99 %", (1.0,): "100 %", (1 - 1e-12,): "100 %",
        (1.5,): "150.00 %",
        (0.864, 0): "86 %", (0.004, 0): "< 1 %", (0.999, 0): "> 99 %",  # with fewer digits
        (0.8644, 1): "86.4 %", (0.0004, 1): "< 0.1 %", (0.99951, 1): "> 99.9 %", (0.0, 1): "0 %",
    }  # fmt: skip
    assert {asked: percent(*asked) for asked in expected} == expected


def test_no_sentence_writes_a_share_in_another_way(root):
    """Python's own format writes no space, and 0 % of what is little."""
    own = [
        (str(path.relative_to(root)), node.lineno)
        for folder in ("mpdiag", "app")
        for path in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr)
        for part in node.format_spec.values
        if isinstance(part, ast.Constant) and str(part.value).endswith("%")
    ]
    assert own == []


def test_no_line_ends_inside_a_cell_of_markdown():
    assert in_markdown("a\r\nb|c\rd") == "a  b\\|c d"
