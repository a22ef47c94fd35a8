"""Every sentence in the code that a user can read is in ``sentences/``, a file for each folder.

A new or changed sentence fails the test until it is written there, so that a review reads it:
``MPDIAG_WRITE_GOLDENS=1`` writes the files. What stands between braces is filled in at run time.
"""

import ast
import re
from pathlib import Path

import pytest
from goldens import assert_as_kept

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = Path(__file__).with_name("sentences")
WORD = re.compile(r"[A-Za-z][a-z]+")
CODE = re.compile(
    r"^\s*(SELECT|WITH|FROM|WHERE|CREATE|import|from \S+ import|def|class|<\w|\(\?|//)"
    r"|\(\?[:P=!]|[;{]\s*$|=> |::"
)
"""How a query, a page's markup or script, a pattern or a template of code begins or ends."""


def template(node: ast.AST) -> str | None:
    """A literal's text, with the names of what an f-string fills in; ``None`` of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        part.value if isinstance(part, ast.Constant) else f"{{{filled_in(part.value)}}}"
        for part in node.values
    )


def filled_in(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return filled_in(function)
        case ast.Subscript(value=value):
            return filled_in(value)
    return "…"


def is_sentence(text: str) -> bool:
    """Whether a text has words with spaces between them: three, or two in a sentence that ends."""
    words = len(re.findall(rf"(?<![\w.-]){WORD.pattern}(?=[\s,.:;!?)]|$)", text))
    return (words > 2 or (words > 1 and text.rstrip().endswith("."))) and not CODE.search(text)


def sentences(source: str) -> list[str]:
    """The sentences of a module in the order of the code, without its docstrings."""
    tree = ast.parse(source)
    found = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            text = template(child)
            if text is None:
                visit(child)
                continue
            if is_sentence(text):
                found.append(" ".join(text.split()))
            if isinstance(child, ast.JoinedStr):
                for part in child.values:
                    if isinstance(part, ast.FormattedValue):
                        visit(part)

    visit(tree)
    return found


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
