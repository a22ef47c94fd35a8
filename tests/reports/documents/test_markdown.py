"""The report as Markdown: the analysis' numbers in tables, a picture beside it, no name is markup."""

import re
from xml.etree import ElementTree as ET

import made_runs as hand
import pytest

from mpdiag.reports.documents.markdown import PARTED, code, escaped, image
from mpdiag.reports.documents.write import write_report


@pytest.fixture(scope="module")
def written(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("markdown") / "my ssd.md"
    write_report(root / "sample_runs" / "ssd", path)
    return path, path.read_text(encoding="utf-8")


def test_its_picture_lies_beside_it(written):
    path, text = written
    assert "](my%20ssd.svg)" in text
    picture = ET.fromstring(path.with_suffix(".svg").read_text(encoding="utf-8"))
    words = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert {"trunk.1", "becomes 0", "0 ←", "→ ∞"} <= set(words)
    titles = [w for w in words if w and "become 0" in w]
    assert titles == [
        "Without a loss scale: 31.21 % become 0",
        "At a loss scale of 64: 1.67 % become 0",
    ]
    assert all(title.split(": ")[1].split(" become")[0] in text for title in titles)


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
    picture = (tmp_path / "report.svg").read_text(encoding="utf-8")
    assert not {e.tag.rpartition("}")[2] for e in ET.fromstring(picture).iter()} & {
        "img",
        "script",
    }


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


def test_a_picture_s_file_is_an_address():
    assert image("a]b", "my (1).svg") == r"![a\]b](my%20%281%29.svg)"
