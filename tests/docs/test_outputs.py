"""What the pages show is what is printed, and what the notebook holds is what it displays."""

import re
from importlib.util import find_spec

import pytest
from doc_pages import PAGES, ROOT, script, text
from goldens import assert_as_kept

OUTPUTS = script("outputs")
SHOWN = [page for page in PAGES if "<!-- output" in text(page)]
NUMBER = re.compile(r"(?:< )?\d[\d.,]*(?:e[+-]\d+)?")


@pytest.fixture(scope="module")
def filled(fork_server):
    """Pages with what their commands print now, each made once."""
    made = {}

    def call(words, folder, environment):
        paths = {"PYTHONPATH": str(ROOT)}
        done = fork_server(*words, cwd=folder, env={**environment, **paths}, timeout=300)
        return done.code, done.out + done.err

    def fill(page):
        if page not in made:
            made[page] = OUTPUTS.filled(text(page), call)
        return made[page]

    return fill


@pytest.mark.parametrize("page", SHOWN)
def test_outputs_are_what_is_printed(page, filled):
    """After a change: python docs/outputs.py, or MPDIAG_WRITE_GOLDENS=1."""
    kept = text(page)
    if "next: mpdiag dashboard" in kept and find_spec("streamlit") is None:
        pytest.skip("without Streamlit another command is the next one")
    printed = filled(page)
    if "examples/" in kept and comparable(printed) == comparable(kept):
        printed = kept  # these pages train: the last digits are of the machine
    assert_as_kept(ROOT / page, printed)


def comparable(page):
    """The words of a page, wherever its lines break, with a sign in place of each number."""
    return NUMBER.sub(" # ", page).split()


def test_the_loss_goes_nan_and_the_plan_mends_it(filled):
    page = filled("docs/problems/nan-in-fp16.md")
    losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", page, flags=re.MULTILINE)]
    fp32, fp16, recorded, by_the_plan = losses
    assert fp16 != fp16
    assert recorded == fp32
    assert by_the_plan == pytest.approx(fp32, rel=0.01)


def test_bf16_is_not_enough_and_the_plan_mends_it(filled):
    page = filled("docs/problems/is-bf16-enough.md")
    fp32, bf16, recorded, by_the_plan = map(int, re.findall(r"(\d+)% of the tokens right", page))
    assert bf16 < 60
    assert min(fp32, recorded, by_the_plan) > 95


def test_a_command_that_fails_stops_the_writing():
    page = "```shell\nmpdiag analyze no/such/run\n```\n<!-- output -->\n"
    with pytest.raises(RuntimeError, match=r"(?s)`mpdiag analyze no/such/run`.*no run"):
        OUTPUTS.filled(page, OUTPUTS.by_subprocess)


def test_an_output_is_replaced_and_cut():
    page = "```shell\npython x.py\npython y.py\n```\n<!-- output: 2 -->\n```text\nold\n```\nrest\n"
    filled = OUTPUTS.filled(page, lambda words, *_: (0, f"{words[1]}\nsecond  \nthird\n"))
    shown = "```text\nx.py\nsecond\ny.py\nsecond\n```\nrest\n"
    assert filled == page.replace("```text\nold\n```\nrest\n", shown)


def test_a_number_is_no_word():
    assert comparable("loses 26.82 % in\n< 0.01 s, 1e+09") == comparable("loses 0 % in 12 s, 3")
    assert comparable("loss nan") != comparable("loss 0.4")
