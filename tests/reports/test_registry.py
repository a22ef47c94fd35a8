"""Views: what the HTML report draws, and that none of them reads a file."""

import ast

from mpdiag.analysis.analyzer import analyze
from mpdiag.reports.contents import read_contents
from mpdiag.reports.registry import reported_pictures

READERS = ("open_run", "list_runs", "analyze", "profile_trace", "compare_profiles", "place")

READS = ("operations", "modules", "parts", "read_text", "read_bytes", "open")


def test_each_picture_of_a_report_has_a_key_of_its_own(root):
    contents = read_contents(analyze(root / "sample_runs" / "digits"))
    keys = [picture.key for picture in reported_pictures(contents)]
    assert keys == [
        *("heat-map", "layer-scales", "ratios", "sensitivity"),
        *("verdicts", "losses"),
    ]


def test_no_view_reads_or_judges_a_file(root):
    """Views draw what they are given; ``contents`` and ``documents.write`` read for them."""
    package = root / "mpdiag"
    wrong = []
    views = [*package.glob("*/views/**/*.py"), *package.glob("reports/text/*.py")]
    shown = ("comparison", "csv_tables", "layer_course", "plan_in_training", "proven_operations")
    shown += ("run_list", "run_overview")
    for path in [*views, *(root / "app" / f"{name}.py" for name in shown)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names_taken = [alias.name for alias in node.names]
                read = [name for name in names_taken if name.startswith(("read_", *READERS))]
                if (node.module or "").startswith("mpdiag.files"):
                    read += [name for name in names_taken if name != "AnyPath"]  # only a type
                wrong += [f"{path.name}: {name}" for name in read]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                wrong += [f"{path.name}: {node.func.attr}()"] * (node.func.attr in READS)
    assert wrong == []
