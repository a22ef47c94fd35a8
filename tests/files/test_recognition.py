"""A file that is something else than what was wanted is called what it is."""

from pathlib import Path

import calls
import pytest

from mpdiag.errors import InputError
from mpdiag.files.recognition import kind_of, named_instead
from mpdiag.tensorcores.readers.recognition import read

TABLE = Path(__file__).with_name("kinds.tsv").read_text().splitlines()
FILES = {name: (text, said) for name, text, said in (row.split("\t") for row in TABLE[1:])}
"""By name: what a file holds, and what it is called where a run is wanted."""


@pytest.fixture
def files(tmp_path):
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_is_known(files, name):
    assert f"{files / name} {FILES[name][1]}" in named_instead(files / name, "run")


def test_what_is_unknown_or_right_is_not_named(files):
    (files / "notes.txt").write_text("hello")
    (files / "big.json").write_text("{")
    assert kind_of(files / "notes.txt") is kind_of(files / "big.json") is None
    assert kind_of(files) is kind_of(files / "nowhere") is None
    assert named_instead(files / "plan.json", "plan") is None


def test_a_file_of_a_run_points_to_its_folder(root):
    run = root / "sample_runs" / "ssd"
    for name in ("plan.json", "training.jsonl", "meta.json", "stats/rank00000-000001.parquet"):
        assert named_instead(run / name, "run").endswith(f"not a run: give the run's folder, {run}")


def test_where_no_run_is_wanted_its_folder_is_no_advice(root):
    place = root / "sample_runs" / "digits"
    said = named_instead(place / "profile.json", "trace")
    assert said.endswith(f"is a part of a run, not a trace: it belongs to the run {place}")


def wrong_places():
    """Commands, and what they say: of files, and of a run where something else is wanted."""
    table = Path(__file__).with_name("wrong_places.tsv").read_text().splitlines()
    return [row.split("\t") for row in table[1:]]


@pytest.mark.parametrize(("words", "sentence"), wrong_places())
def test_every_command_says_so(files, root, words, sentence):
    (files / "notes.txt").write_text("hello")
    places = {"files": files, "runs": root / "sample_runs"}
    done = calls.run(*words.format(**places).split())
    assert done.exit_code == 3
    assert sentence.format(**places) in " ".join(done.stderr.split())


def test_a_single_trace_of_a_run_is_no_folder_of_ranks(root):
    folder = root / "sample_runs" / "ssd"
    with pytest.raises(InputError, match="is a run, not a trace"):
        read(folder)
