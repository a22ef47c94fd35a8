"""Every behaviour of the table, at every level of ours."""

from __future__ import annotations

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
                awaited = behaviour.missing(subject)
                marks = [pytest.mark.xfail(strict=True, reason=awaited)] if awaited else []
                name = f"{behaviour.name}-{subject.label}"
                yield pytest.param(behaviour, subject, id=name, marks=marks)


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
        said = {name.split()[0] for name in (*behaviour.on_purpose, *behaviour.awaited)}
        assert said <= {s.level for s in LEVELS}
        assert not behaviour.on_purpose.keys() & behaviour.awaited.keys()
