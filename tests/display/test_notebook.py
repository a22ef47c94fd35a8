"""What notebooks show: the facts, and nothing that a name could smuggle in."""

from dataclasses import replace

import pytest
from html_reader import Page
from support import backoff, record_and_train

import mpdiag
from mpdiag.display import notebook
from mpdiag.plan import Fp32Choice, PrecisionPlan, ReductionPlan, Verdict

EVIL = "<script>alert('x')</script>&\"'"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record_and_train(folder / "mine", folder / "trained")
    return mpdiag.open_run(folder / "mine")


def shown(thing):
    tags = Page(thing._repr_html_())
    assert "script" not in tags.tags
    return tags.text


def test_parts_escape():
    html = notebook.card(
        EVIL,
        notebook.facts([(EVIL, EVIL)]),
        notebook.table([EVIL], [[EVIL]]),
        notebook.items([(EVIL, EVIL)]),
        notebook.note(EVIL),
        mood=EVIL,
    )
    tags = Page(html)
    assert "script" not in tags.tags
    assert tags.text.count("<script>") == 8


def test_a_plan():
    plan = replace(
        backoff(64.0),
        verdict=Verdict(text=EVIL),
        run=EVIL,
        fp32_modules=(Fp32Choice("", EVIL, reason=EVIL),),
        reduction=ReductionPlan("fp16", pre_divide=True),
    )
    text = shown(plan)
    assert "64, backoff" in text
    assert "fp16, divided before" in text
    assert EVIL in text
    assert repr(plan) == "<PrecisionPlan fp16 O1, loss scale backoff 64, 1 modules in FP32>"
    assert "none (not needed)" in shown(PrecisionPlan())


def test_a_run(run):
    text = shown(run)
    assert "complete" in text
    assert "3 of 3" in text
    assert "at the last of 3 steps" in text
    assert "mine" in repr(run)
    assert EVIL in shown(replace(run, meta={"state": EVIL}))


def test_a_log_that_cannot_be_read_says_nothing(run, tmp_path):
    broken = replace(run, folder=tmp_path)
    (tmp_path / "training.jsonl").write_text('{"step": 0, "loss": 1}\n[]\n{"step": 1}\n')
    assert "Loss" not in shown(broken)


def test_a_module_that_stays_in_fp32_as_a_whole_is_listed_once():
    whole, single = Fp32Choice("", "head", "too large"), Fp32Choice("exp", "body", "overflows")
    plan = PrecisionPlan(fp32_modules=(whole,), fp32_operations=(whole, single))
    assert plan._repr_html_().count("too large") == 1
    assert plan._repr_html_().count("overflows") == 1
