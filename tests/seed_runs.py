"""Runs of trainings that differ by their seed: a log without statistics."""

from mpdiag.files.atomic import write_json
from mpdiag.runs.training_log import LogWriter, Metric, TrainingStep


def make_run(
    folder, *, losses=(3.0, 2.0, 1.0), metric=None, seed=None, state="complete", notes=(), **meta
):
    """A training that logged these losses (None: the step was skipped), notes and accuracy.

    Further fields of its ``meta.json`` may be given.
    """
    folder.mkdir(parents=True)
    seeds = {} if seed is None else {"seeds": {"torch": seed}}
    write_json(folder / "meta.json", {"schema_version": 1, "state": state, **seeds, **meta})
    log = LogWriter(folder)
    for step, loss in enumerate(losses):
        log.append(TrainingStep(step, loss, 1.0, skipped=loss is None))
    for note in notes:
        log.append(note)
    if metric is not None:
        log.append(Metric("accuracy", metric))
    log.close()
