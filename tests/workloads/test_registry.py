"""Finding workloads by name."""

import pytest
from script_processes import scripts

from mpdiag import workloads
from mpdiag.installation import bundled
from mpdiag.workloads.ssd import Ssd


def test_names_are_those_that_load() -> None:
    assert len(workloads.names()) == 3
    assert workloads.names() == tuple(sorted(workloads.names()))
    assert [workloads.load(name).name for name in workloads.names()] == list(workloads.names())


def test_options_reach_the_workload() -> None:
    assert workloads.load("ssd", size="large") == Ssd(size="large")


def test_every_workload_has_a_size_for_a_gpu() -> None:
    for name in workloads.names():
        small, large = (workloads.load(name, size=size) for size in workloads.SIZES)
        assert small == workloads.load(name) != large


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (
            "yolo", {}, "UnknownWorkload",
            "there is no workload 'yolo': choose one of digits, gpt, ssd",
        ),
        (
            "ssd", {"width": 3}, "BadOption",
            "'ssd' has no option 'width': its options are mean_over, inputs,",
        ),
        ("gpt", {"size": "huge"}, "BadOption", "'gpt' has no size 'huge': choose one of small, large"),
        ("ssd", {"mean_over": "anchors"}, "BadOption", "choose one of boxes, matched"),
    ],
)  # fmt: skip
def test_what_is_unknown_is_answered_with_what_is_known(name, options, error, words) -> None:
    kind = getattr(workloads, error)
    with pytest.raises(kind, match=words):
        workloads.load(name, **options)
    assert issubclass(kind, ValueError)


MINE = scripts(__file__)["mine"]


def test_a_file_defines_a_workload(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    loaded = workloads.load(str(path), rate=0.2)
    assert (loaded.name, loaded.rate) == ("mine", 0.2)
    assert loaded == workloads.load(str(path), rate=0.2)  # the file is run once
    path.write_text(MINE.replace("0.1", "0.5"))
    changed = workloads.load(str(path))
    assert (changed.rate, type(changed) is type(loaded)) == (0.5, False)
    with pytest.raises(workloads.BadOption, match="has no option 'size': its options are rate"):
        workloads.load(str(path), size="large")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no file .*mine.py"),
        ("import dataclasses, nothing_of_this_name", "cannot be imported .ModuleNotFoundError"),
        ("import dataclasses; 1 / 0", "cannot be imported .ZeroDivisionError: division by zero"),
        ("x = 1", "defines no workload"),
        ("raise SystemExit  # a training script", "defines no workload"),
        (
            MINE + MINE.partition("@")[1] + MINE.partition("@")[2].replace("Mine(", "Two("),
            "defines 2",
        ),
    ],
)
def test_a_file_without_one_workload_is_refused_in_a_sentence(tmp_path, text, sentence) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(workloads.DamagedWorkload, match=sentence) as caught:
        workloads.load(str(path))
    assert caught.value.exit_code == 3


def test_a_workload_of_the_repository_is_found_in_a_clone_only(monkeypatch, root) -> None:
    assert workloads.load("vgg").name == "vgg"
    monkeypatch.setattr(bundled, "_PACKAGE", root / "nowhere" / "mpdiag")
    with pytest.raises(workloads.UnknownWorkload, match="run this command in a clone") as caught:
        workloads.load("vgg")
    assert caught.value.exit_code == 2
