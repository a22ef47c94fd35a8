"""What every page has in common: it opens on every run, its links are harmless, its names are text."""

import re
import shutil
from pathlib import Path
from urllib.parse import parse_qsl

import made_runs as hand
import pytest
from app_pages import VIEWS, figures, page_text, words
from goldens import assert_as_kept

from mpdiag.hardware.tables import read_table

RUNS = ("ssd", "ssd-fp16-plan", "digits", "denoiser", "gpu-sample")
SAYS_WHY = {"ssd-fp16-plan": "is a training by a plan", "gpu-sample": "holds only a profile"}
RECEIPTS = ("gradients", "updates", "operations", "training")
REFUSED = ("verdict", "precision", "gradients", "layers", "updates", "operations", "formats")
KEPT = Path(__file__).parents[1] / "data" / "pages"
pytestmark = pytest.mark.filterwarnings("default")  # Streamlit's own, of being run bare


def test_a_page_of_each_choice_is_kept(opened, root):
    for row in read_table(Path(__file__).with_name("choices.tsv")):
        test = opened(view=row["view"], run="ssd", **dict(parse_qsl(row["link"])))
        text = page_text(test).replace(f"{root}", "HERE")
        assert_as_kept(KEPT / "choices" / f"{row['name']}.txt", text)


@pytest.mark.parametrize(
    ("view", "run"), [("runs", "ssd"), *((v, r) for r in RUNS for v in VIEWS if v != "runs")]
)
def test_every_view_on_every_sample_run(opened, root, caplog, view, run):
    test = opened(view=view, run=run)
    assert not test.exception
    assert "Serialization" not in caplog.text  # a table as it is, not as Streamlit mends it
    assert len(test.title) == 1
    assert not test.subheader  # no heading is skipped
    if view in RECEIPTS:  # one beside each figure
        receipts = [block.value for block in test.code if block.language == "python"]
        assert len(receipts) == len(figures(test)) > 0 or run in SAYS_WHY
        for receipt in receipts:
            compile(receipt, "receipt.py", "exec")
    assert test.sidebar.selectbox[0].value == run
    refused = run in SAYS_WHY and view in REFUSED
    assert not test.error  # a training, or a profile, is a normal state
    assert not refused or SAYS_WHY[run] in test.info[0].value
    if view != "runs":  # whose table is that of all sample runs
        text = page_text(test).replace(f"{root}", "HERE")
        assert_as_kept(KEPT / run / f"{view}.txt", text)


def test_the_app_loads_no_torch(real, root, tmp_path):
    for name in ("digits", "digits-fp16-plan"):
        shutil.copytree(root / "sample_runs" / name, tmp_path / name)
    code = (
        "import os, sys\n"
        f"os.environ['MPDIAG_RUNS'] = {str(tmp_path)!r}\n"
        "from streamlit.testing.v1 import AppTest\n"
        f"test = AppTest.from_file({str(root / 'app' / 'main.py')!r}, default_timeout=60).run()\n"
        f"for view in {VIEWS!r}:\n"
        "    assert not test.switch_page(f'views/{view}.py').run().exception\n"
        "print('torch' in sys.modules)\n"
    )
    child = real("-c", code, cwd=root)
    assert child.code == 0, child.err[-2000:]
    assert child.out.strip() == "False"


@pytest.mark.parametrize("name", ["../ssd", "/etc", "..", "ssd/../../secret", "%2e%2e/secret", ""])
def test_a_link_reads_nothing_outside_the_folder(opened, root, tmp_path, name):
    inside = tmp_path / "runs"
    shutil.copytree(root / "sample_runs" / "digits", inside / "digits")
    shutil.copytree(root / "sample_runs" / "ssd", tmp_path / "secret")
    test = opened(inside, "verdict", run=name, a=name, b=name, trainings=name)
    assert not test.exception
    assert test.sidebar.selectbox[0].value == "digits"
    assert "Detector" not in words(test)
    test.switch_page("views/compare.py").run()
    assert not test.exception
    assert "Detector" not in words(test)


def test_a_link_to_a_run_that_is_gone_says_so(opened, root, tmp_path):
    shutil.copytree(root / "sample_runs" / "digits", tmp_path / "digits")
    assert "which is not in this folder" in words(opened(tmp_path, "verdict", run="gone"))
    assert "This link points to" not in words(opened(tmp_path, "verdict", run="digits"))


def test_a_link_full_of_nonsense_opens_what_there_is(opened):
    for view, query in (
        ("gradients", {"kind": "x", "format": "y", "scale": "999", "tab": "z", "log": "maybe"}),
        ("gradients", {"scale": "abc", "find": "<b>", "layer": "nope"}),
        ("layers", {"layer": "nope", "kind": "x", "step": "-1", "tab": "z", "find": "<b>"}),
        ("updates", {"parameter": "nope", "update_log": "2"}),
        ("training", {"trainings": "nope", "smooth": "1000", "scaler": "z", "first": "-5"}),
        ("compare", {"a": "nope", "kind": "q", "measure": "zz"}),
    ):
        test = opened(view=view, run="digits", **query)
        assert not test.exception
        assert not test.error


@pytest.mark.parametrize("view", VIEWS)
def test_names_are_text_on_every_page(opened, tmp_path, view):
    hand.write_run(tmp_path / "<b>hostile")
    hand.write_run(tmp_path / "second")
    test = opened(tmp_path, view, run="<b>hostile")
    assert not test.exception
    assert view in ("overview", "verdict") or not test.error  # the verdict itself is one
    for text in words(test).split("\n"):
        assert "<img" not in text.replace("\\<", "")
        assert "<b>" not in text.replace("\\<", "")
        assert "](javascript" not in text


def test_an_empty_folder_says_what_to_do(opened, tmp_path):
    test = opened(tmp_path)
    assert "mpdiag demo" in words(test)
    assert "there are no runs" in words(opened(tmp_path, "verdict"))


def test_one_run_may_be_opened_by_itself(opened, root):
    test = opened(root / "sample_runs" / "digits", "verdict")
    assert test.sidebar.selectbox[0].options == ["digits"]
    assert not test.exception


def test_the_menu_has_every_page(root):
    source = (root / "app" / "main.py").read_text(encoding="utf-8")
    listed = re.findall(r'\("(\w+)", "[\w ]+", "\w+"\)', source)
    assert tuple(listed) == VIEWS
    assert set(listed) == {path.stem for path in (root / "app" / "views").glob("*.py")}
