"""Ranks beside each other."""

from __future__ import annotations

import json

import pytest
from row_buffer import table_of

from mpdiag.analysis.recording_checks import rank_findings
from mpdiag.runs.run import open_run
from mpdiag.runs.writer import RunWriter

LABELS = {"placement": "replicated", "stage": "reduced"}
OLD = "2026-01-01T00:00:00.000+00:00"


@pytest.fixture
def fleet(tmp_path):
    """Write a run: for each rank its state, and the weights of its steps."""

    def write(ranks, world=None, updated=OLD):
        for rank, (state, weights) in ranks.items():
            writer = RunWriter(tmp_path / "run", rank=rank, world_size=world or len(ranks))
            rows = [
                (step, "weight", "up.weight", weight, LABELS | {"rank": rank})
                for step, weight in enumerate(weights)
            ]
            writer.append(table_of(rows))
            meta = {"rank": rank, "world_size": world or len(ranks), "state": state}
            writer.write_meta({**meta, "steps_seen": len(weights), "updated": updated})
        return rank_findings(open_run(tmp_path / "run"))

    return write


SAME = [[1.0, 2.0]] * 4


def test_ranks_that_agree_and_end_are_not_mentioned(fleet):
    assert fleet({0: ("complete", SAME), 1: ("complete", SAME)}) == []


def test_a_killed_rank_is_named_with_its_last_step(fleet):
    (finding,) = fleet({0: ("failed", SAME), 1: ("recording", SAME[:2]), 2: ("failed", SAME)})
    assert finding.code == "rank-stopped"
    assert finding.severity == "warning"
    assert finding.evidence["rank"] == 1
    assert finding.evidence["steps"] == 2
    assert "rank 1 of 3 was killed after 2 steps" in finding.message
    assert OLD in finding.message
    json.dumps(finding.to_json())


def test_a_rank_that_failed_earlier_than_the_others(fleet):
    (finding,) = fleet({0: ("complete", SAME), 1: ("failed", SAME[:3])})
    assert finding.evidence["rank"] == 1
    assert "failed after 3 steps" in finding.message


def test_a_run_that_is_being_recorded_is_let_be(fleet):
    from mpdiag.runs.run import now

    assert fleet({0: ("recording", SAME), 1: ("recording", SAME[:3])}, updated=now()) == []


def test_a_rank_without_a_word(fleet):
    (finding,) = fleet({0: ("complete", SAME)}, world=2)
    assert finding.code == "rank-missing"
    assert finding.evidence["ranks"] == [1]


def test_copies_that_differ_are_named_with_the_first_step(fleet):
    other = [*SAME[:2], [1.0, 2.5], [1.0, 3.0]]
    (finding,) = fleet({0: ("complete", SAME), 1: ("complete", other)})
    assert finding.code == "ranks-disagree"
    assert finding.evidence == {"parameters": ["up.weight"], "first_step": 2, "ranks": [0, 1]}
