"""The report as Markdown: the numbers of the analysis, its histogram, and no name is markup."""

import re

import made_runs as hand
import pytest

from mpdiag.reports.documents.markdown import PARTED, code, escaped
from mpdiag.reports.documents.write import write_report


@pytest.fixture(scope="module")
def written(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("markdown") / "my ssd.md"
    write_report(root / "sample_runs" / "ssd", path)
    return path, path.read_text(encoding="utf-8")


def test_the_histogram_stands_in_it(written):
    path, text = written
    assert list(path.parent.iterdir()) == [path]
    begin = text.index("Activation gradients of all layers")
    assert begin < text.index("| Loss scale")
    drawn = re.search(r"```text\n(.*?)```", text[begin:], re.DOTALL)[1]
    assert "scale 1 ·" in drawn
    assert "×64 ·" in drawn


def test_every_row_of_a_table_has_its_cells_and_names_are_no_markup(tmp_path):
    folder = tmp_path / "<b>run|"
    hand.write_run(folder)
    text = write_report(folder, tmp_path / "report.md").read_text(encoding="utf-8")
    text = re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL)
    bare = re.sub(r"\\.", "", text)  # what is escaped is text
    ours = re.sub(r"</?(?:details|summary)>", "", re.sub(r"(`+).+?\1", "", bare))
    assert not re.search(r"<[a-z]", ours)
    for table in re.findall(r"(?:^\|.*\n)+", bare, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_only_what_means_something_in_markdown_is_escaped():
    for text in (
        "0.94 %, 2.5e-3, < 0.01 %, (a + b) - c!",
        "use model.to(memory_format=torch.channels_last), nothing else: 3 > 2 = 1",
        "aten::cudnn_convolution 6272 × 256, 50 & more, heads.0, mAP@0.5 and C# 8",
    ):
        assert escaped(text) == text
    expected = {
        "a*b": r"a\*b", "_x_ add_": r"\_x\_ add\_", "[a](b)": r"\[a\](b)", "<b>": r"\<b>",
        "`c` $d$ ~e~ f|g": r"\`c\` \$d\$ \~e\~ f\|g", "# head": r"\# head", "1. one": r"1\. one",
        "&lt; http://x www.y": r"\&lt; http\://x www\.y", "- item": r"\- item",
        "a\r\nb": "a b", "c:\\d": r"c:\\d",
    }  # fmt: skip
    assert {text: escaped(text) for text in expected} == expected
    expected = {"a_b": "`a_b`", "a`b": "``a`b``", "`": "`` ` ``", "a|b": "`a|b`"}
    assert {text: code(text) for text in expected} == expected


def test_what_github_looks_for_in_the_finished_page_is_parted():
    """There an escape is gone: ``\\@team`` still calls the team, ``\\#12`` still is a link."""
    for text in "@team (@team) me@there.org #12 owner/name#12 GH-12 :tada:".split():
        shown = escaped(text)
        assert shown.replace(PARTED, "").lstrip("\\") == text
        assert re.search(rf"(@|#|GH-|:){PARTED}", shown)
    assert f":{PARTED}" in escaped("a :+1: b")
