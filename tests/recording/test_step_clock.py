"""The step clock: events by hand, no torch."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from mpdiag.recording.step_clock import (
    MOST_PHASES,
    OptimizerSteps,
    Step,
    StepClock,
    StepListener,
)

MODEL, OTHER = 1, 2  # models, by ``id``


class Diary(StepListener):
    """Writes down what it hears, with the step that the clock is in then.

    Steps end and begin within the turn of the pace.
    """

    def __init__(self, clock, pace):
        self.clock, self.pace = clock, pace
        self.heard = []

    def note(self, word):
        self.heard.append((word, self.clock.number))

    def step_began(self, step):
        assert self.pace.in_turn or step.opens or step.number == 0
        self.note("began recorded" if step.recorded else "began")

    def forward_began(self):
        self.note("forward")

    def backward_reached(self):
        self.note(f"backward {self.clock.micro}")

    def optimizer_stepped(self, optimizer):
        self.note(f"stepped {optimizer}")

    def step_ended(self, step):
        assert self.pace.in_turn
        self.note("ended recorded" if step.recorded else "ended")

    def stopped(self):
        self.note("stopped")

    def steps(self, event):
        """The steps in which an event was heard, each time."""
        return [number for word, number in self.heard if word.startswith(event)]

    @property
    def ends(self):
        return self.steps("ended")


class Every:
    """Records each step divisible by a number, and counts turns."""

    def __init__(self, every=1):
        self.every = every
        self.turns = []
        self.in_turn = False

    def wants(self, step):
        return step % self.every == 0

    def wants_in_phase(self, _rounds):
        return False

    @contextmanager
    def turn(self, ended):
        self.turns.append(ended)
        self.in_turn = True
        yield
        self.in_turn = False


class Started(Every):
    """Records the first round, and the first two of each phase."""

    def wants(self, step):
        return step == 0

    def wants_in_phase(self, rounds):
        return rounds < 2


class Backward:
    """Whether a backward pass is under way, and what waits for its end."""

    def __init__(self):
        self.under_way = False
        self.waiting = []

    def __enter__(self):
        self.under_way = True

    def __exit__(self, *_):
        self.under_way = False
        for call in self.waiting:
            call()
        self.waiting.clear()


NAMES = {}


def named(name):
    """The optimizer of a name: one object, as the clock knows them by ``id``."""
    return NAMES.setdefault(name, name)


def started(*optimizers, every=1, pace=None):
    backward, pace = Backward(), pace or Every(every)
    optimizers = [named(o) if isinstance(o, str) else o for o in optimizers]
    clock = StepClock(optimizers, lambda: backward.under_way, backward.waiting.append)
    diary = Diary(clock, pace)
    clock.attach([diary], pace)
    clock.start()
    clock.begin()
    return clock, diary, backward


def one_pass(clock, model=MODEL):
    """A forward pass of a model, preceded by what every module call says, and its gradients."""
    clock.pass_began()
    clock.forward_began(model)
    if clock.recording:
        clock.backward_reached()


def play(clock, script):
    """Let things happen: passes (``p``; ``q`` of the other model; ``r``, backward alone), calls of a
    module, optimizers that join (``+a``), evaluate the loss (``a!``) and step (``a``)."""
    for event in script.split():
        if event in ("p", "q"):
            one_pass(clock, MODEL if event == "p" else OTHER)
        elif event == "r":
            clock.pass_began()
            clock.backward_reached()
        elif event == "call":
            clock.pass_began()
        elif event == "end":
            clock.end_step()
        elif event[0] == "+":
            clock.adopt([named(event[1:])])
        elif event[-1] == "!":
            clock.optimizer_begins(named(event[:-1]), evaluates=True)
        else:
            clock.optimizer_begins(named(event), evaluates=False)
            clock.optimizer_stepped(named(event))


def test_a_plain_loop_ends_a_step_with_each_optimizer_step():
    clock, diary, _ = started("sgd", every=2)
    for _ in range(3):
        one_pass(clock)
        clock.optimizer_stepped(named("sgd"))
    assert diary.heard == [
        ("began recorded", 0),
        *(("forward", 0), ("backward 0", 0), ("stepped sgd", 0), ("ended recorded", 0)),
        ("began", 1),
        *(("forward", 1), ("stepped sgd", 1), ("ended", 1)),
        ("began recorded", 2),
        *(("forward", 2), ("backward 0", 2), ("stepped sgd", 2), ("ended recorded", 2)),
        ("began", 3),
    ]
    assert not clock.trained
    assert not clock.due


TABLE = Path(__file__).with_name("step_clock_stories.tsv").read_text().splitlines()
STORIES = {name: cells for name, *cells in (row.split("\t") for row in TABLE[1:])}
"""By name: the optimizers, what happens, which steps the pace wants (``phase``: the first two of each
phase), and the steps in which an optimizer stepped, those that ended and the first that were recorded;
nothing where a story is not about them."""


@pytest.mark.parametrize("name", STORIES)
def test_which_steps_there_are(name):
    """Whether to record is decided for a round of all optimizers."""
    optimizers, events, every, stepped, ended, recorded = STORIES[name]
    pace = Started() if every == "phase" else Every(int(every))
    clock, diary, _ = started(*optimizers, pace=pace)
    play(clock, eval(events))
    began = [n for n in diary.steps("began recorded") if every != "phase" or n > 9]
    assert not stepped or diary.steps("stepped") == eval(stepped)
    assert not ended or diary.ends == eval(ended)
    assert not recorded or began[: len(eval(recorded))] == eval(recorded)


def test_a_step_is_due_until_the_other_optimizer_may_no_longer_step():
    clock, _, _ = started("a", "b")
    dues = []
    for event in ("p", "a", "b", "p"):
        play(clock, event)
        dues.append((clock.due, clock.trained))
    assert dues == [(False, True), (True, True), (False, False), (False, True)]


def test_passes_are_numbered_in_a_step_for_each_model():
    clock, diary, _ = started("a")
    play(clock, "p a p q p p a")
    passes = [word for word, number in diary.heard if word.startswith("backward") and number == 1]
    assert passes == ["backward 0", "backward 0", "backward 1", "backward 2"]


def test_whether_steps_accumulate_is_learned_from_recorded_steps_alone():
    clock, _, _ = started("a", every=2)
    found = [clock.present.accumulating]
    for script in ("p p a", "p a", "p a"):  # of the second, which is not recorded, nothing is known
        play(clock, script)
        found.append(clock.present.accumulating)
    assert found == [False, True, True, False]
    assert clock.present == Step(3, recorded=False, accumulating=False)


def test_how_often_an_optimizer_has_stepped():
    clock, _, _ = started("c", "g", every=2)
    play(clock, "p c p c p g " * 3 + "end")
    assert clock.steps_of(named("c")) == OptimizerSteps(6, 4)
    assert clock.steps_of(named("g")) == OptimizerSteps(3, 2)
    assert clock.steps_of(named("unknown")) == OptimizerSteps()


def test_an_optimizer_evaluates_until_it_has_stepped():
    clock, _, _ = started("s", "l")
    evaluating = []
    for event in ("p", "s", "l!", "p", "l"):
        play(clock, event)
        evaluating.append(clock.evaluating)
    assert evaluating == [False, False, True, True, False]


def test_optimizers_that_step_within_the_backward_pass_end_the_step_after_it():
    optimizers = tuple(map(named, "abc"))
    clock, diary, backward = started(*optimizers)
    for _ in range(2):
        clock.pass_began()
        clock.forward_began(MODEL)
        with backward:
            for optimizer in optimizers:
                clock.backward_reached()
                clock.optimizer_stepped(optimizer)
            assert diary.ends == list(range(clock.number))
        assert diary.ends[-1] == clock.number - 1
    assert diary.ends == [0, 1]


class Grown:
    def __init__(self):
        self.param_groups = [{"params": [1]}]


def with_phases(*optimizers, pace=None):
    clock, diary, _ = started(*optimizers, pace=pace or Started())
    return clock, lambda: [n for n in diary.steps("began recorded") if n > 9]


def test_one_that_evaluates_the_loss_itself_has_its_very_first_step_recorded():
    clock, recorded = with_phases("a", "l")
    play(clock, "p a " * 30 + "l!")
    clock.evaluation_began(named("l"))
    play(clock, "p")
    clock.evaluation_ended()
    play(clock, "l")
    assert recorded() == [30]
    assert clock.steps_of(named("l")) == OptimizerSteps(1, 1)
    assert clock.steps_of(named("l")).evaluations == 1


def test_the_first_step_of_a_phase_is_recorded_however_thin_the_pace_is():
    class Thin(Started):
        def wants_in_phase(self, rounds):
            return rounds % 8 == 0

    clock, _ = with_phases("a", "l", pace=Thin())
    play(clock, "p a " * 30 + "l! p l")  # the closure's pass ends the step that was due
    assert clock.steps_of(named("l")) == OptimizerSteps(1, 1)


def test_parameters_that_are_added_begin_a_phase():
    optimizer = Grown()
    clock, recorded = with_phases(optimizer)
    for count in (30, 10):
        for _ in range(count):
            one_pass(clock)
            clock.optimizer_stepped(optimizer)
        optimizer.param_groups.append({"params": [2, 3]})
    assert recorded() == [31, 32]


def test_phases_are_bounded():
    clock, recorded = with_phases("first")
    for turn in range(30):  # an optimizer for each task
        play(clock, f"+t{turn} " + f"p t{turn} " * 25)
    assert len(recorded()) <= 2 * MOST_PHASES
    assert clock.number + clock.due == 750


def test_the_first_recorded_step_of_a_phase_opens_it():
    pace = Started()
    clock, _ = with_phases("a", pace=pace)
    play(clock, "p a " * 30 + "+b " + "p b " * 5 + "end")
    assert [step.number for step in pace.turns if step.opens] == [30]


def test_muted_it_counts_steps_and_records_none():
    clock, diary, _ = started("sgd")
    clock.mute()
    assert not clock.recording
    clock.end_step()
    assert diary.heard[-2:] == [("ended", 0), ("began", 1)]
    clock.stop()
    assert diary.heard[-1] == ("stopped", 1)


def test_closed_it_counts_no_steps():
    clock, diary, _ = started("sgd")
    clock.close()
    clock.end_step()
    assert (diary.ends, clock.number) == ([], 0)
