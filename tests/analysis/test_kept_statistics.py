"""What a long run's analysis keeps: the same figures without its rows, until the run changes."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from mpdiag.analysis import kept_statistics, streaming
from mpdiag.analysis.analyzer import analyze
from mpdiag.analysis.streaming import read_statistics
from mpdiag.installation.bundled import sample_runs
from mpdiag.runs.run import Run, open_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of a sample run that is long enough to be kept, beside an empty cache."""
    monkeypatch.setattr(kept_statistics, "KEEP_FROM", 0)
    monkeypatch.setenv("MPDIAG_CACHE", str(tmp_path / "cache"))
    shutil.copytree(sample_runs() / "language_model", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def unread(monkeypatch):
    """The rows cannot be read."""

    def refuse(*_arguments, **_options):
        message = "the rows were read"
        raise AssertionError(message)

    def now():
        monkeypatch.setattr(Run, "pieces", refuse)
        monkeypatch.setattr(Run, "rows", refuse)

    return now


def told(folder):
    return json.dumps(analyze(folder).to_json(), sort_keys=True)


@pytest.mark.parametrize("limit", [0, 1 << 60], ids=["streamed", "held"])
def test_a_second_analysis_says_the_same_without_reading_the_rows(
    run, unread, monkeypatch, limit
) -> None:
    monkeypatch.setattr(streaming, "STREAM_FROM", limit)
    monkeypatch.setenv("MPDIAG_CACHE", "")
    plain = told(run)
    assert not (run.parent / "cache").exists()
    monkeypatch.setenv("MPDIAG_CACHE", str(run.parent / "cache"))
    first = told(run)
    unread()
    assert first == told(run) == plain


def test_every_question_has_its_own_answer(run, unread) -> None:
    def answers():
        statistics = read_statistics(open_run(run))
        steps = statistics.steps()
        gradients = statistics.layers()
        names = gradients.of_kind("activation_grad").names.tolist()[:3]
        parameters = gradients.of_kind("weight_grad").names.tolist()
        without = statistics.without_weight_gradients([parameters[0].rpartition(".")[0]])
        return [
            *(len(one.layers()) for one in (statistics, without)),
            *(statistics.activations(some) for some in (names, names[:1])),
            *([h.numel.tolist() for h in statistics.by_step(names, s)] for s in (steps, steps[:2])),
        ]

    first = answers()
    unread()
    assert answers() == first
    assert first[0] != first[1]
    assert first[4] != first[5]


def test_a_part_that_changes_is_read_again(run, unread) -> None:
    told(run)
    part = next((run / "stats").iterdir())
    os.utime(part, ns=(1, 1))
    unread()
    with pytest.raises(AssertionError, match="the rows were read"):
        told(run)


def test_what_is_kept_of_a_run_that_changes_meanwhile_is_not_used(run) -> None:
    statistics = read_statistics(open_run(run))
    statistics.steps()
    os.utime(next((run / "stats").iterdir()), ns=(1, 1))
    statistics.updates()
    kept = {file.stem for file in (run.parent / "cache").rglob("*.npz")}
    assert kept == {"steps"}


def test_a_damaged_answer_is_made_again(run) -> None:
    first = told(run)
    for file in (run.parent / "cache").rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:50])
    assert told(run) == first


def test_without_a_folder_to_keep_them_in_all_is_computed(run) -> None:
    (run.parent / "cache").write_text("no folder")
    assert told(run) == told(run)


def test_a_short_run_keeps_nothing(run, monkeypatch) -> None:
    monkeypatch.setattr(kept_statistics, "KEEP_FROM", 1 << 30)
    told(run)
    assert not (run.parent / "cache").exists()
