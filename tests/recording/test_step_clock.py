"""The step clock: events by hand, no torch."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from mpdiag.recording.step_clock import (
    MOST_PHASES,
    OptimizerSteps,
    Pace,
    Step,
    StepClock,
    StepListener,
)

MODEL, OTHER = 1, 2  # models, by ``id``


class Diary(StepListener):
    """Writes down what it hears, with the step that the clock is in then."""

    def __init__(self, clock):
        self.clock = clock
        self.heard = []

    def note(self, word):
        self.heard.append((word, self.clock.number))

    def step_began(self, step):
        self.note("began recorded" if step.recorded else "began")

    def forward_began(self):
        self.note("forward")

    def backward_reached(self):
        self.note(f"backward {self.clock.micro}")

    def optimizer_stepped(self, optimizer):
        self.note(f"stepped {optimizer}")

    def step_ended(self, step):
        self.note("ended recorded" if step.recorded else "ended")

    def stopped(self):
        self.note("stopped")

    @property
    def ends(self):
        return [number for word, number in self.heard if word.startswith("ended")]


class Every(Pace):
    """Records each step divisible by a number, and counts turns."""

    def __init__(self, every=1):
        self.every = every
        self.turns = []

    def wants(self, step):
        return step % self.every == 0

    @contextmanager
    def turn(self, ended):
        self.turns.append(ended)
        yield


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


def started(*optimizers, every=1):
    backward, pace = Backward(), Every(every)
    clock = StepClock(optimizers, lambda: backward.under_way, backward.waiting.append)
    diary = Diary(clock)
    clock.attach([diary], pace)
    clock.start()
    clock.begin()
    return clock, diary, backward


def one_pass(clock, model=MODEL):
    """A forward pass of a model, preceded by what every module call says, and its gradients."""
    clock.call_began()
    clock.forward_began(model)
    if clock.recording:
        clock.backward_reached()


def test_a_plain_loop_ends_a_step_with_each_optimizer_step():
    clock, diary, _ = started("sgd", every=2)
    for _ in range(3):
        one_pass(clock)
        clock.optimizer_stepped("sgd")
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


def test_accumulation_numbers_the_passes_of_a_step():
    clock, diary, _ = started("sgd")
    for _ in range(2):
        for _ in range(3):
            one_pass(clock)
        clock.optimizer_stepped("sgd")
    passes = [word for word, number in diary.heard if word.startswith("backward") and number == 1]
    assert passes == ["backward 0", "backward 1", "backward 2"]
    assert diary.ends == [0, 1]
    assert clock.present == Step(2, recorded=True, accumulating=True)


def test_whether_steps_accumulate_is_learned_from_recorded_steps_alone():
    clock, _, _ = started("sgd", every=2)
    assert not clock.present.accumulating
    for _ in range(2):
        one_pass(clock)
    clock.optimizer_stepped("sgd")
    assert clock.present.accumulating
    one_pass(clock)
    clock.optimizer_stepped("sgd")  # of the step that was not recorded, nothing is known
    assert clock.present.accumulating
    one_pass(clock)
    clock.optimizer_stepped("sgd")
    assert not clock.present.accumulating


def test_each_model_has_passes_of_its_own():
    clock, _, _ = started("sgd")
    micros = []
    for model in (MODEL, OTHER, MODEL):
        clock.forward_began(model)
        micros.append(clock.micro)
    assert micros == [0, 0, 1]


def test_two_optimizers_in_turn_share_a_step_that_the_second_ends():
    clock, diary, _ = started("a", "b")
    for i in range(3):
        one_pass(clock)
        clock.optimizer_stepped("a")
        assert (clock.due, diary.ends) == (True, list(range(i)))  # the other one may step yet
        clock.optimizer_stepped("b")
        assert (clock.due, diary.ends) == (False, list(range(i + 1)))


def test_a_call_of_any_module_ends_a_step_that_is_due():
    clock, diary, _ = started("a", "b")
    clock.call_began()
    assert diary.ends == []
    clock.optimizer_stepped("a")
    clock.call_began()
    assert diary.ends == [0]


def test_a_rare_optimizer_delays_no_step():
    clock, diary, _ = started("often", "rarely")
    for i in range(6):
        one_pass(clock)
        clock.optimizer_stepped("often")
        if i % 3 == 2:
            clock.optimizer_stepped("rarely")
    one_pass(clock)
    assert diary.ends == list(range(6))


@pytest.mark.parametrize("begin", ["forward", "backward"])
def test_optimizers_that_take_turns_have_steps_of_their_own(begin):
    """Three steps in each turn of a GAN's loop; the next one begins with a forward or backward pass."""
    clock, diary, _ = started("critic", "generator")
    for _ in range(3):
        for optimizer in ("critic", "critic", "generator"):
            if begin == "forward":
                one_pass(clock)
            else:
                clock.backward_began()
                clock.backward_reached()
            clock.optimizer_stepped(optimizer)
    clock.end_step()
    stepped = [(word, number) for word, number in diary.heard if word.startswith("stepped")]
    assert [number for _, number in stepped] == diary.ends == list(range(9))
    assert clock.steps_of("critic") == OptimizerSteps(6, 6)
    assert clock.steps_of("generator") == OptimizerSteps(3, 3)
    assert clock.steps_of("unknown") == OptimizerSteps()


@pytest.mark.parametrize(
    ("turn", "every", "recorded"),
    [
        ("ab", 2, [0, 1, 4, 5]),
        ("aab", 2, [0, 1, 2, 6, 7, 8]),
        ("a", 2, [*range(8), 9, 11, 13]),  # the other one never steps, and is waited for once
        ("aaaaaaaaab", 4, [*range(8), 18, 29, *range(40, 48)]),  # nor is one that hardly ever does
        ("aaaaab", 2, [*range(6), *range(12, 18)]),
    ],
)
def test_whether_to_record_is_decided_for_a_round_of_all_optimizers(turn, every, recorded):
    optimizers = {"a": object(), "b": object()}
    clock, diary, _ = started(*optimizers.values(), every=every)
    for letter in (turn * 99)[: recorded[-1] + 1]:
        one_pass(clock)
        clock.optimizer_stepped(optimizers[letter])
    clock.end_step()
    assert [n for word, n in diary.heard if word == "began recorded"][: len(recorded)] == recorded


def test_an_optimizer_that_takes_over_is_not_waited_for_by_the_one_before():
    clock, diary, _ = started("a", every=4)
    for _ in range(8):
        one_pass(clock)
        clock.optimizer_stepped("a")
    clock.adopt(["b"])
    for _ in range(8):
        one_pass(clock)
        clock.optimizer_stepped("b")
    assert [n for word, n in diary.heard if word == "began recorded"] == [0, 4, 8, 12]


def test_a_second_step_of_one_optimizer_is_another_step():
    clock, diary, _ = started("a", "b")
    one_pass(clock)
    for optimizer in ("a", "a", "b"):
        clock.optimizer_begins(optimizer, evaluates=False)
        clock.optimizer_stepped(optimizer)
    stepped = [(word, number) for word, number in diary.heard if word.startswith("stepped")]
    assert stepped == [("stepped a", 0), ("stepped a", 1), ("stepped b", 1)]


def test_an_optimizer_that_evaluates_the_loss_itself_begins_a_step():
    clock, diary, _ = started("sgd", "lbfgs")
    one_pass(clock)
    clock.optimizer_stepped("sgd")
    clock.optimizer_begins("lbfgs", evaluates=True)
    assert (diary.ends, clock.evaluating) == ([], True)
    one_pass(clock)
    assert (diary.ends, clock.evaluating) == ([0], True)
    clock.optimizer_stepped("lbfgs")
    assert not clock.evaluating
    assert ("stepped lbfgs", 1) in diary.heard


def test_a_closure_evaluated_often_is_one_step_of_several_passes():
    clock, diary, _ = started("lbfgs")
    for _ in range(4):
        one_pass(clock)  # inside optimizer.step
    clock.optimizer_stepped("lbfgs")
    assert diary.ends == [0]
    assert [word for word, _ in diary.heard if word.startswith("backward")] == [
        f"backward {i}" for i in range(4)
    ]


def test_a_step_that_a_scaler_skips_is_a_step():
    clock, diary, _ = started("sgd")
    one_pass(clock)
    clock.optimizer_stepped("sgd")  # said by the scaler, in the optimizer's place
    one_pass(clock)
    clock.optimizer_stepped("sgd")
    assert diary.ends == [0, 1]


def test_without_an_optimizer_the_next_pass_begins_a_step():
    clock, diary, _ = started(every=2)
    for _ in range(3):
        one_pass(clock)
    assert diary.ends == [0, 1]
    assert clock.trained
    clock.end_step()  # as closing does
    assert diary.ends == [0, 1, 2]


def test_optimizers_that_step_within_the_backward_pass_end_the_step_after_it():
    optimizers = ("a", "b", "c")
    clock, diary, backward = started(*optimizers)
    for _ in range(2):
        clock.call_began()
        clock.forward_began(MODEL)
        with backward:
            for optimizer in optimizers:
                clock.backward_reached()
                clock.optimizer_stepped(optimizer)
            assert diary.ends == list(range(clock.number))
        assert diary.ends[-1] == clock.number - 1
    assert diary.ends == [0, 1]


def test_an_exception_in_the_middle_leaves_the_step_open():
    clock, diary, _ = started("sgd")
    one_pass(clock)
    clock.optimizer_stepped("sgd")
    one_pass(clock)  # and its loop fails here
    assert (diary.ends, clock.trained, clock.due, clock.number) == ([0], True, False, 1)
    one_pass(clock)  # a loop that goes on has a second pass in this step
    clock.optimizer_stepped("sgd")
    assert diary.ends == [0, 1]


def test_an_optimizer_that_joins_later_is_waited_for_from_then_on():
    clock, diary, _ = started("a")
    for _ in range(3):
        one_pass(clock)
        clock.optimizer_stepped("a")
    clock.adopt(["b"])
    one_pass(clock)
    clock.optimizer_stepped("a")
    assert (diary.ends, clock.due) == ([0, 1, 2], True)
    clock.optimizer_stepped("b")
    one_pass(clock)
    assert diary.ends == [0, 1, 2, 3]


class Started(Every):
    """Records the first round, and the first two of each phase."""

    def wants(self, step):
        return step == 0

    def wants_in_phase(self, rounds):
        return rounds < 2


class Grown:
    """An optimizer whose groups can be added to."""

    def __init__(self):
        self.param_groups = [{"params": [1]}]


def with_phases(*optimizers):
    clock, diary, _ = started(*optimizers)
    clock.attach([diary], Started())
    return clock, lambda: [n for word, n in diary.heard if word == "began recorded" and n > 9]


def steps(clock, optimizer, count):
    for _ in range(count):
        one_pass(clock)
        clock.optimizer_begins(optimizer, evaluates=False)
        clock.optimizer_stepped(optimizer)


def test_an_optimizer_that_joins_late_begins_a_phase_with_the_step_at_hand():
    clock, recorded = with_phases("a")
    steps(clock, "a", 30)
    clock.adopt(["b"])
    steps(clock, "b", 30)
    assert recorded() == [30, 31]


def test_an_optimizer_that_joins_in_the_middle_of_a_step_leaves_that_step_alone():
    clock, recorded = with_phases("a")
    steps(clock, "a", 30)
    one_pass(clock)
    clock.adopt(["b"])
    clock.optimizer_stepped("b")
    assert 30 not in recorded()
    steps(clock, "b", 5)
    assert 31 in recorded()


def test_an_optimizer_that_waited_begins_a_phase_when_it_steps_first():
    clock, recorded = with_phases("a", "b")
    steps(clock, "a", 30)
    steps(clock, "b", 5)  # which of them steps is known only at the end of the first one
    assert recorded()[:1] == [31]


def test_one_that_evaluates_the_loss_itself_has_its_very_first_step_recorded():
    clock, recorded = with_phases("adam", "lbfgs")
    steps(clock, "adam", 30)
    clock.optimizer_begins("lbfgs", evaluates=True)
    clock.evaluation_began("lbfgs")
    one_pass(clock)
    clock.evaluation_ended()
    clock.optimizer_stepped("lbfgs")
    assert recorded() == [30]
    assert clock.steps_of("lbfgs") == OptimizerSteps(1, 1)
    assert clock.steps_of("lbfgs").evaluations == 1


def test_the_first_step_of_a_phase_is_recorded_however_thin_the_pace_is():
    class Thin(Started):
        def wants_in_phase(self, rounds):
            return rounds % 8 == 0

    clock, diary, _ = started("adam", "lbfgs")
    clock.attach([diary], Thin())
    steps(clock, "adam", 30)
    clock.optimizer_begins("lbfgs", evaluates=True)
    one_pass(clock)  # its closure's: it ends the step that was due
    clock.optimizer_stepped("lbfgs")
    assert clock.steps_of("lbfgs") == OptimizerSteps(1, 1)


def test_parameters_that_are_added_begin_a_phase():
    optimizer = Grown()
    clock, recorded = with_phases(optimizer)
    steps(clock, optimizer, 30)
    optimizer.param_groups.append({"params": [2, 3]})
    steps(clock, optimizer, 10)
    assert recorded() == [31, 32]


def test_phases_are_bounded():
    clock, recorded = with_phases("first")
    for turn in range(30):  # an optimizer for each task
        clock.adopt([turn])
        steps(clock, turn, 25)
    assert len(recorded()) <= 2 * MOST_PHASES
    assert clock.number + clock.due == 750


def test_the_first_recorded_step_of_a_phase_opens_it():
    clock, diary, _ = started("a")
    pace = Started()
    clock.attach([diary], pace)
    steps(clock, "a", 30)
    clock.adopt(["b"])
    steps(clock, "b", 5)
    clock.end_step()
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


def test_a_step_ends_and_begins_within_the_paces_turn():
    clock = StepClock(["sgd"], lambda: False, lambda call: call())
    within = []

    class Watched(Every):
        @contextmanager
        def turn(self, ended):
            within.append(("enter", ended.number))
            yield
            within.append(("leave", ended.number))

    class Listener(StepListener):
        def step_ended(self, step):
            within.append(("ended", step.number))

        def step_began(self, step):
            within.append(("began", step.number))

    clock.attach([Listener()], Watched())
    clock.start()
    clock.begin()
    clock.optimizer_stepped("sgd")
    assert within == [("began", 0), ("enter", 0), ("ended", 0), ("began", 1), ("leave", 0)]
