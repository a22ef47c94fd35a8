"""The report: one file, offline, the verdict first, and no name in it is ever markup."""

import html
import json
import re

import calls
import made_runs as hand
import pytest
import torch
from audited_trainings import BF16, model, train
from html_reader import Page

from mpdiag.analysis.analyzer import analyze
from mpdiag.reports.documents.run_report import _value
from mpdiag.reports.documents.write import write_report


def read(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "<b>run"
    hand.write_run(folder)
    return folder, read(write_report(folder))


@pytest.fixture(scope="module")
def sample(root, tmp_path_factory):
    run = root / "sample_runs" / "ssd"
    path = write_report(run, tmp_path_factory.mktemp("report") / "ssd.html")
    return analyze(run), path, read(path)


def test_it_opens_offline_and_is_small(sample):
    _, path, page = sample
    assert path.stat().st_size < 6_000_000
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "base"), tag
        assert not {"src", "href", "srcset"} & set(attributes), (tag, attributes)
    whole = path.read_text(encoding="utf-8")
    assert whole.count("plotly.js v") == 1  # embedded, and once
    assert "@import" not in whole[: whole.index("<script>")]


def test_the_verdict_stands_before_the_evidence(sample):
    analysis, _, page = sample
    places = [
        page.text.index(words)
        for words in (analysis.verdict.text, "Findings", "Evidence", "Provenance")
    ]
    assert places == sorted(places)
    assert "torch 2." in page.text
    assert (
        "0.94 %" in page.text or f"{100 * analysis.loss_scale.underflow_after:.2f} %" in page.text
    )


def test_its_figures_are_data_that_a_browser_can_read(sample):
    _, _, page = sample
    figures = [json.loads(text) for text in page.scripts if text.startswith('{"data"')]
    places = [a for t, a in page.elements if t == "div" and a.get("class") == "figure"]
    assert len(figures) == len(places) == 6
    assert all(figure["data"] for figure in figures)
    receipts = [t for t, _ in page.elements if t == "pre"]
    assert len(receipts) == len(figures)


def test_before_and_after_the_loss_scale_are_one_switch(sample):
    _, path, page = sample
    panes = [a for t, a in page.elements if a.get("class") == "pane"]
    assert ["hidden" in a for a in panes] == [False, True]
    assert "Without a loss scale: 31.21 % become 0" in page.text
    assert "At a loss scale of 64: 1.67 % become 0" in page.text
    whole = path.read_text(encoding="utf-8")
    maps = [
        json.loads(re.search(rf'id="data-heat-map-{i}">(.*?)</script>', whole)[1]) for i in (0, 1)
    ]
    ranges = [m["layout"]["xaxis"]["range"] for m in maps]
    assert ranges[0] == ranges[1]  # only the format's range moves
    assert 'id="heat-map"' not in whole


def test_without_a_scale_there_is_nothing_to_switch(root, tmp_path):
    page = read(write_report(root / "sample_runs" / "digits", tmp_path / "digits.html"))
    assert not [a for _, a in page.elements if a.get("class") == "switched"]
    assert [a for _, a in page.elements if a.get("id") == "heat-map"]


def test_wide_tables_have_a_box_that_the_keyboard_reaches(sample):
    _, _, page = sample
    tables = [t for t, _ in page.elements if t == "table"]
    boxes = [a for _, a in page.elements if a.get("class") == "wide"]
    assert len(boxes) == len(tables) >= 2
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)


def test_provenance_is_in_words():
    dense = {"until": 20, "reason": "recording took 35 % of the time"}
    cadence = {"every": None, "budget": 0.02, "dense": dense, "thinned": [], "most_steps": 1200}
    told = "budget 0.02, dense until 20, reason recording took 35 % of the time, most steps 1,200"
    assert _value(cadence) == told


def test_names_are_text(hostile):
    _, page = hostile
    scripts = [a for t, a in page.elements if t == "script"]
    expected = len([a for a in scripts if a.get("type") == "application/json"]) + 2
    assert len(scripts) == expected  # plotly.js, the drawing, the data: none of the names'
    tags = {tag for tag, _ in page.elements}
    assert "img" not in tags
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    assert hand.HOSTILE in page.text
    assert hand.SCRIPT in page.text
    assert "<b>run" in page.text
    assert "&lt;" not in page.text  # nothing is escaped twice


def test_the_command_writes_into_the_run_and_says_where(tmp_path):
    run = hand.write_run(tmp_path / "run")
    result = calls.run("report", run)
    assert result.exit_code == 0
    assert "".join(result.stdout.split()) == str(run / "report.html")
    assert (run / "report.html").is_file()
    page = read(run / "report.html")
    assert html.unescape(page.text).count("Receipt: these numbers in plain pandas") == 4


def test_a_place_that_cannot_be_written(tmp_path):
    run = hand.write_run(tmp_path / "run")
    result = calls.run("report", run, "-o", tmp_path / "no" / "x.html")
    assert result.exit_code == 2
    assert re.search(r"cannot write .*x.html", "".join(result.stderr.split("\n")))


def test_a_report_has_the_precision_of_a_training_that_says_it(sample, tmp_path):
    weights = model(BF16)
    run = tmp_path / "bf16"
    audit = train(weights, torch.optim.AdamW(weights.parameters(), lr=1e-2), run)
    page = read(write_report(run))
    text = write_report(run, tmp_path / "bf16.md").read_text(encoding="utf-8")
    for words in (audit.line, *(f.message[1:] for f in audit.findings)):
        assert words in page.text
        assert words in text.replace("\\", "")
    assert "0.weight and 5 more" in page.text
    for words in ("What this recording can answer", "FP16 or BF16?"):
        assert words in page.text
        assert words not in sample[2].text
