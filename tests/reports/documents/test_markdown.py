"""The report as Markdown: the analysis' numbers in tables, and no name is ever markup."""

from __future__ import annotations

import re

import made_runs as hand

from mpdiag.analysis.analyzer import analyze
from mpdiag.display.wording import percent
from mpdiag.reports.documents.write import write_report


def test_it_says_what_the_analysis_says(root, tmp_path):
    run = root / "sample_runs" / "ssd"
    text = write_report(run, tmp_path / "ssd.md").read_text(encoding="utf-8")
    plain = text.replace("\\", "")
    analysis = analyze(run)
    assert plain.startswith(f"## {analysis.verdict.text}")
    for finding in analysis.findings:
        assert finding.message in plain
        assert f"`{finding.code}`" in plain
    figures = analysis.to_json()["figures"]
    lost = {f["layer"]: f["value"] for f in figures if f["key"] == "layer-values"}
    rows = re.findall(r"^\| (\S+) \| \S+ %.*? \| (.*?) \| .*? \|$", plain, re.MULTILINE)
    shown = {name: share for name, share in rows if name in lost}
    assert len(shown) >= 5
    assert shown == {name: percent(lost[name]) for name in shown}


def test_every_row_of_a_table_has_its_cells_and_names_are_no_markup(tmp_path):
    folder = tmp_path / "<b>run|"
    hand.write_run(folder)
    text = write_report(folder, tmp_path / "report.md").read_text(encoding="utf-8")
    bare = re.sub(r"\\.", "", text)  # what is escaped is text
    assert not re.search(r"<[a-z]", bare)
    for table in re.findall(r"(?:^\|.*\n)+", bare, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
