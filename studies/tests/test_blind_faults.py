"""The judge of planted mistakes: its edits fit, and it tells a culprit from another place."""

from typing import Any

import pytest

from studies import blind_faults
from studies.blind_faults import Pair

FAULT = Pair("gpt-x", "gpt", "refactor", ("blocks.0.mlp", "update"))


def test_each_mistake_fits_its_script_once_and_compiles(tmp_path):
    for pair in blind_faults.pairs():
        script = blind_faults.write(pair, tmp_path / pair.name)
        compile(script.read_text(), str(script), "exec")


@pytest.mark.parametrize("turn", [2, 3])
@pytest.mark.parametrize("half", ["dev", "unseen"])
def test_a_file_of_a_later_round_holds_the_mistakes_of_its_half(half, turn):
    told = (blind_faults.SCRIPTS / f"mistakes-{turn}-{half}.txt").read_text()
    headers = [line.split(" | ") for line in told.splitlines() if line[:1] not in ("", *"#-+ ")]
    wanted = f"{half}{turn}"
    of = {pair.name for pair in blind_faults.pairs() if pair.culprits and pair.half == wanted}
    assert {f"{script}-{name}" for name, script, *_ in headers} == of
    assert of


@pytest.mark.parametrize("turn", [4, 5])
def test_a_round_with_one_half_has_clean_pairs_of_each_script_and_kind(turn):
    told = (blind_faults.SCRIPTS / f"mistakes-{turn}.txt").read_text()
    headers = [line.split(" | ") for line in told.splitlines() if line[:1] not in ("", *"#-+ ")]
    of = [pair for pair in blind_faults.pairs() if pair.script in {h[1] for h in headers}]
    assert {pair.half for pair in of} == {f"unseen{turn}"}
    assert sorted(f"{script}-{name}" for name, script, *_ in headers) == sorted(
        pair.name for pair in of if pair.culprits
    )
    clean = [pair for pair in of if not pair.culprits]
    assert {pair.script for pair in clean} == {pair.script for pair in of}
    assert {pair.kind for pair in clean} == set(blind_faults.OPTIONS)
    assert (len(headers), len(clean)) == (50, 30)


@pytest.mark.parametrize(
    ("half", "scripts", "pairs"),
    [
        ("unseen6", blind_faults.SIXTH, 36),
        ("unseen7", blind_faults.SEVENTH, 47),
        ("unseen8", blind_faults.EIGHTH, 50),
        ("unseen9", blind_faults.NINTH, 66),
    ],
)
def test_a_later_round_is_clean_and_has_each_script_in_many_kinds(half, scripts, pairs):
    of = [pair for pair in blind_faults.pairs() if pair.half == half]
    assert not any(pair.culprits or pair.edits for pair in of)
    assert {pair.script for pair in of} == set(scripts)
    assert {pair.kind for pair in of} == set(blind_faults.OPTIONS)
    assert len({(pair.script, pair.way, pair.kind) for pair in of}) == len(of) == pairs


@pytest.mark.parametrize("half", ["unseen4", "unseen5", "unseen6", "unseen7", "unseen8", "unseen9"])
def test_each_refactoring_of_a_round_with_one_half_fits_its_script(half, tmp_path):
    of = [p for p in blind_faults.pairs() if (p.half, p.kind) == (half, "refactor")]
    assert of
    for pair in of:
        script = blind_faults.write(pair, tmp_path / pair.name)
        text = script.read_text()
        for _, new in blind_faults.refactorings()[pair.way]:
            assert new in text, (pair.name, new)
        compile(text, str(script), "exec")


@pytest.mark.parametrize(
    ("module", "phase", "result"),
    [
        ("blocks.0.ffn.down", "forward", "named"),
        ("blocks.0", "forward", "seen"),
        ("blocks.0.mlp2", "forward", "seen"),
        ("embed", "update", "named"),
        (None, "backward", "seen"),
    ],
)
def test_the_first_place_is_named_if_it_lies_in_a_culprit(module, phase, result):
    first: dict[str, Any] = {"module": module, "phase": phase, "kind": "operation"}
    said = {"first": first, "agree": False, "compared": {"cannot_say_from": None}}
    assert blind_faults.judge(FAULT, said) == result


def test_a_fault_of_which_nothing_can_be_said_is_not_missed():
    said = {"first": None, "agree": True, "compared": {"cannot_say_from": 1}}
    assert blind_faults.judge(FAULT, said) == "cannot say"


def test_a_second_way_of_refactoring_fits_its_script_and_differs_from_the_first(tmp_path):
    ways = blind_faults.refactorings()
    for script in (way.removesuffix(" b") for way in ways if way.endswith(" b")):
        for way in (script, f"{script} b"):
            text = (blind_faults.SCRIPTS / f"{script}.py").read_text()
            for old, new in ways[way]:
                assert old in text, (way, old)
                text = text.replace(old, new)
        clean = [p for p in blind_faults.pairs() if p.name.startswith(f"clean-{script}-refactor")]
        written = {blind_faults.write(pair, tmp_path / pair.name).read_text() for pair in clean}
        assert len(written) == len(clean) == 2
