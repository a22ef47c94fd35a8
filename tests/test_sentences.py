"""Every sentence in the code that a user can read is in ``sentences/``, a file for each folder.

A new or changed sentence fails the test until it is written there, so that a review reads it:
``MPDIAG_WRITE_GOLDENS=1`` writes the files. What stands between braces is filled in at run time.
"""

import re
from pathlib import Path

import pytest
from goldens import assert_as_kept
from source_texts import texts

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = Path(__file__).with_name("sentences")
WORD = re.compile(r"[A-Za-z][a-z]+")
CODE = re.compile(
    r"^\s*(SELECT|WITH|FROM|WHERE|CREATE|import|from \S+ import|def|class|<\w|\(\?|//)"
    r"|\(\?[:P=!]|[;{]\s*$|=> |::"
)
"""How a query, a page's markup or script, a pattern or a template of code begins or ends."""


def is_sentence(text: str) -> bool:
    """Whether a text has words with spaces between them: three, or two in a sentence that ends."""
    words = len(re.findall(rf"(?<![\w.-]){WORD.pattern}(?=[\s,.:;!?)]|$)", text))
    return (words > 2 or (words > 1 and text.rstrip().endswith("."))) and not CODE.search(text)


def sentences(source: str) -> list[str]:
    """The sentences of a module in the order of the code, without its docstrings."""
    return [" ".join(text.split()) for text in texts(source) if is_sentence(text)]


FOLDERS = sorted(
    {
        path.relative_to(ROOT).parts[:2] if path.parent != ROOT / "mpdiag" else ("mpdiag",)
        for path in (ROOT / "mpdiag").rglob("*.py")
    }
    | {("app",)}
)


@pytest.mark.parametrize("folder", FOLDERS, ids=".".join)
def test_every_sentence_is_known(folder):
    files = (ROOT.joinpath(*folder)).glob("*.py" if folder == ("mpdiag",) else "**/*.py")
    pages = []
    for path in sorted(files):
        found = sentences(path.read_text(encoding="utf-8"))
        if found:
            pages.append("\n".join((f"# {path.relative_to(ROOT).as_posix()}", *found)))
    assert_as_kept(SENTENCES / f"{'.'.join(folder)}.txt", "\n\n".join(pages))


AVOIDED = re.compile(
    r"\b(anew|likewise|nobody|none of which|beside|insurance|stand still|so many|is said)\b|^Of [a-z]"
)
"""Words that readers stumbled over, and sentences that begin with what they are about."""


def test_sentences_are_in_plain_words():
    found = [
        line
        for path in SENTENCES.glob("*.txt")
        for line in path.read_text(encoding="utf-8").splitlines()
        if AVOIDED.search(line)
    ]
    assert found == []
