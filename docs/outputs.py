"""What the commands of the documentation print, written into its pages and into the notebook.

    python docs/outputs.py                                 all pages, and the notebook in examples/
    python docs/outputs.py docs/commands/why.md …          these

``<!-- output -->`` after a shell block stands before what its commands print, ``<!-- output: 3 -->``
before the first three lines of each. The commands of a page run one after the other in an empty folder
that has the repository's ``examples`` and ``sample_runs``, on a terminal of 90 columns. A test compares
what is written with what is printed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[list[str], Path, dict[str, str]], tuple[int, str]]
    """Runs words in a folder with an environment: the exit code, then stdout and stderr as one."""

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "recommend_then_train.ipynb"
ENVIRONMENT = {"COLUMNS": "90", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
_BLOCK = re.compile(
    r"^```shell\n(?P<lines>(?:(?!```).*\n)+)```\n(?P<mark><!-- output(?:: (?P<first>\d+))? -->)\n"
    r"(?:```text\n(?:(?!```).*\n)*```\n)?",
    re.MULTILINE,
)


def main() -> None:
    import nbformat

    pages = [Path(word).resolve() for word in sys.argv[1:]]
    for page in pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            page.write_text(filled(text, by_subprocess), encoding="utf-8")
            print(page.relative_to(ROOT))
    if not pages:
        with TemporaryDirectory(prefix="mpdiag-docs-") as folder:
            notebook = executed(NOTEBOOK, Path(folder), {**os.environ, **ENVIRONMENT, **_here()})
        nbformat.write(notebook, NOTEBOOK)


def filled(markdown: str, call: Call) -> str:
    """A page with what its commands print today.

    Raises:
        RuntimeError: A command fails.
    """
    if not _BLOCK.search(markdown):
        return markdown
    with TemporaryDirectory(prefix="mpdiag-docs-") as name:
        folder = Path(name)
        for kept in ("examples", "sample_runs"):
            (folder / kept).symlink_to(ROOT / kept)
        return _BLOCK.sub(lambda match: _with_output(match, folder, call), markdown)


def _with_output(match: re.Match[str], folder: Path, call: Call) -> str:
    first = int(match["first"]) if match["first"] else None
    printed = [
        line.rstrip()
        for command in match["lines"].splitlines()
        for line in _output(command, folder, call).strip("\n").splitlines()[:first]
    ]
    text = "\n".join(printed)
    return f"```shell\n{match['lines']}```\n{match['mark']}\n```text\n{text}\n```\n"


def _output(line: str, folder: Path, call: Call) -> str:
    code, printed = call(shlex.split(line, comments=True), folder, ENVIRONMENT)
    if code:
        message = f"`{line}` in the documentation fails:\n{printed}"
        raise RuntimeError(message)
    return printed


def by_subprocess(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run ``mpdiag …`` or ``python …`` as a process of its own."""
    program = ["-m", "mpdiag"] if words[0] == "mpdiag" else []
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=folder,
        env={**os.environ, **environment, **_here()},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def executed(path: Path, folder: Path, environment: dict[str, str]) -> Any:
    """A notebook with what it displays when it runs in a folder."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    client = nbclient.NotebookClient(
        notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    notebook.metadata = nbformat.from_dict(metadata)  # not what the kernel says about itself
    return notebook


def _here() -> dict[str, str]:
    """The variable with which another process imports this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    main()
