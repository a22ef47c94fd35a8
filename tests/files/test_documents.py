"""JSON documents: one that is larger than any of ours is refused unread."""

import os

import fsspec
import pytest
from made_runs import assert_one_sentence, write_run

from mpdiag.errors import DamagedPlan, DamagedRun
from mpdiag.files import documents
from mpdiag.files.paths import place
from mpdiag.plan import PrecisionPlan
from mpdiag.runs.run import open_run


def make_sparse(path, size=documents.LARGEST + 1):
    """A file of any size that takes no room on the disk."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(size)


def test_a_sparse_document_is_refused_unread(tmp_path):
    run = write_run(tmp_path / "run")
    for read, error, path in (
        (open_run, DamagedRun, run / "meta.json"),
        (PrecisionPlan.load, DamagedPlan, tmp_path / "plan.json"),
    ):
        make_sparse(path)
        with pytest.raises(error) as caught:
            read(run if error is DamagedRun else path)
        assert_one_sentence(caught, path.name, "bytes")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_document_that_is_no_regular_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "comparison.json")
    with pytest.raises(ValueError, match="it is not a file"):
        documents.read_document(tmp_path / "comparison.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"x\ud800y"', "x�y"),
        (r'{"\uDFFF": ["\udc80", 1, null]}', {"�": ["�", 1, None]}),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\\ud800"', r"\ud800"),  # an escaped backslash
    ],
)
def test_half_a_character_is_replaced_and_a_whole_one_stays(tmp_path, text, value):
    (tmp_path / "a.json").write_text(text)
    assert documents.read_document(tmp_path / "a.json") == value


def test_the_source_is_searched_once_however_many_values_there_are():
    class Source(bytes):
        searches = 0

        def __contains__(self, part):
            self.searches += 1
            return super().__contains__(part)

    source = Source(b'[%s"\\ud83d\\ude00"]' % (b"0, " * 1000))
    assert documents.whole_characters([0] * 1000 + ["\ud800"], source)[-1] == "\ufffd"
    assert source.searches <= 2


def test_a_remote_document_is_bounded_too(monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 8)
    with fsspec.open("memory://documents/a.json", "w") as file:
        file.write('{"a": [1, 2]}')
    with pytest.raises(ValueError, match="bytes"):
        documents.read_document(place("memory://documents/a.json"))
