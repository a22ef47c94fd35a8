"""Every behaviour of the conformance table, of other people's trainers."""

from __future__ import annotations

import pytest
from conformance.behaviours.everything import CHAPTERS
from conformance.outcomes import Behaviour, outcome_of
from conformance.subjects.protocol import Subject
from conformance_table import table, written
from peers import PEERS, VERSIONS, installed

BEHAVIOURS = [b for chapter in CHAPTERS for b in chapter.behaviours]


@pytest.mark.parametrize("subject", PEERS, ids=str)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.name)
def test_peers(behaviour: Behaviour, subject: Subject):
    known = VERSIONS[subject.package]
    if installed(subject) != known:
        pytest.skip(f"what is said of {subject} was seen with {subject.package} {known}")
    outcome = outcome_of(behaviour, subject)
    if subject.name in behaviour.instead:
        assert outcome.kind == "fails", f"it is said to differ, and {outcome.kind}"
    else:
        assert outcome.kind != "fails", outcome.note


def test_what_differs_is_said_of_a_known_peer():
    for behaviour in BEHAVIOURS:
        assert behaviour.instead.keys() <= {s.name for s in PEERS}


def test_the_table_in_the_documentation_is_up_to_date():
    if any(installed(s) != VERSIONS[s.package] for s in PEERS):
        pytest.skip("the table was made with other versions")
    assert written() == table(), "run python studies/tests/conformance_table.py"
