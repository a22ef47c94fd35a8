"""What commands print and notebooks show, kept word for word in ``tests/data/printed``."""

import shutil
from pathlib import Path

import pytest
from goldens import assert_as_kept
from html_reader import Page
from tensorcores.timeline.test_ranks import trace as rank_trace
from tensorcores.traces import FALLBACK, SGEMM, kernel, launch, op, product, step, write
from typer.testing import CliRunner

import mpdiag
from mpdiag.cli import app
from mpdiag.version import __version__

KEPT = Path(__file__).parents[1] / "data" / "printed"
HOSTILE = "<img src=x onerror=alert(1)>|`x`"
GOLDENS = dict(
    line.split("\t")
    for line in Path(__file__).with_name("printed.tsv").read_text(encoding="utf-8").splitlines()
)
"""File -> words of the command; its output, or the file that it writes."""


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    place = tmp_path_factory.mktemp("goldens")
    for name in ("ssd", "ssd-fp16-plan", "digits"):
        shutil.copytree(root / "sample_runs" / name, place / name)
    shutil.copy(root / "sample_runs" / "gpu-sample" / "trace.json.gz", place / "sample.json.gz")
    hostile = product(256, 250, 256, 60, 70, dtype="float")
    write(place / "step.json", [*step(), hostile, launch(4, 65), kernel(HOSTILE, 4, 5)])
    before = [product(256, 256, 256, 0, 10), launch(1, 5), kernel(SGEMM, 1, 90)]
    write(place / "before.json", before)
    causes = [
        *step(),
        product(128, 512, 256, 60, 70, dtype="float"), launch(5, 65), kernel(SGEMM, 5, 20),
        product(512, 513, 513, 80, 90, "c10::BFloat16"), launch(6, 85), kernel(FALLBACK, 6, 40),
        product(512, 77, 512, 95, 98, "c10::BFloat16"), launch(7, 97), kernel(FALLBACK, 7, 40),
        op("aten::relu", 99, 100),
    ]  # fmt: skip
    write(place / "causes.json", causes)
    write(place / "unlinked.json", [kernel(SGEMM, 1, 90)])  # of no operation, no module
    (place / "ranks").mkdir()
    for rank, compute in ((0, 40), (1, 70)):
        path = rank_trace(place / f"rank{rank}.json", rank, compute)
        shutil.copy(path, place / "ranks" / path.name)
    return place


@pytest.mark.parametrize("name", GOLDENS)
def test_word_for_word(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, GOLDENS[name].split())
    assert result.exit_code == 0, result.output
    text = Path("out.md").read_text(encoding="utf-8") if name.endswith(".md") else result.output
    assert_as_kept(KEPT / name, text.replace(__version__, "VERSION").replace(str(folder), "FOLDER"))


@pytest.mark.parametrize("name", [n for n in GOLDENS if n.endswith(".txt")])
def test_nothing_is_cut_at_any_width(folder, monkeypatch, name):
    """An ellipsis is what rich puts where a table or a sentence does not fit."""
    monkeypatch.chdir(folder)
    for width in (30, 60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = CliRunner().invoke(app, GOLDENS[name].split()).stdout
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines())


def test_what_notebooks_show(folder):
    """Of each object its words, the next step among them, how many pictures, and its repr."""
    ssd, digits = (mpdiag.analyze(folder / name) for name in ("ssd", "digits"))
    compared = mpdiag.compare(folder / "ssd", folder / "ssd-fp16-plan")
    parts = []
    for thing in (ssd.run, ssd, ssd.plan, digits, digits.plan, compared):
        html = thing._repr_html_()
        assert len(html) < 100_000
        parts += [repr(thing), Page(html).text, f"{html.count('<svg')} pictures"]
    assert_as_kept(KEPT / "notebook.txt", "\n".join(parts).replace(str(folder), "FOLDER"))
