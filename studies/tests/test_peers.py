"""Every behaviour of the conformance table, of other people's trainers."""

from __future__ import annotations

import pytest
from conformance import table
from conformance.behaviours.everything import CHAPTERS
from conformance.outcomes import Behaviour, outcome_of
from conformance.subjects.everyone import PEERS
from conformance.subjects.protocol import Subject

BEHAVIOURS = [b for chapter in CHAPTERS for b in chapter.behaviours]


@pytest.mark.parametrize("subject", PEERS, ids=str)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.check.__name__)
def test_peers(behaviour: Behaviour, subject: Subject):
    known = table.VERSIONS[subject.package]
    if table.installed(subject) != known:
        pytest.skip(f"what is said of {subject} was seen with {subject.package} {known}")
    outcome = outcome_of(behaviour, subject)
    if subject.name in behaviour.instead:
        assert outcome.kind == "fails", f"it is said to differ, and {outcome.kind}"
    else:
        assert outcome.kind != "fails", outcome.note
