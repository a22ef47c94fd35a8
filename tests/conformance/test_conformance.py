"""Every behaviour of the table, at every level of ours."""

import pytest
from conformance.behaviours.everything import CHAPTERS
from conformance.outcomes import Behaviour, outcome_of
from conformance.subjects.ours import LEVELS, ours
from conformance.subjects.protocol import Subject

BEHAVIOURS = [b for chapter in CHAPTERS for b in chapter.behaviours]


def of_ours():
    for chapter in CHAPTERS:
        for behaviour in chapter.behaviours:
            for subject in ours(chapter):
                yield pytest.param(behaviour, subject, id=f"{behaviour.name}-{subject.label}")


@pytest.mark.parametrize(("behaviour", "subject"), list(of_ours()))
def test_ours(behaviour: Behaviour, subject: Subject):
    outcome = outcome_of(behaviour, subject)
    if behaviour.purpose(subject):
        assert outcome.kind == "fails", "it holds: it differs on purpose no more"
    else:
        assert outcome.kind != "fails", outcome.note


def test_names_are_unlike_and_deviations_are_of_known_subjects():
    names = [b.name for b in BEHAVIOURS]
    assert len(set(names)) == len(names)
    for behaviour in BEHAVIOURS:
        assert {name.split()[0] for name in behaviour.on_purpose} <= {s.level for s in LEVELS}
