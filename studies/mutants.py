"""How much do the tests protect? Drawn mutants of the package, each run against the tests that reach it.

    python studies/mutants.py draw                    # once: 40 places in each of five folders, seed 28
    python studies/mutants.py run [--tree CHECKOUT] [--name NAME] [--only FOLDER ...] [--workers N]
                                  [--killed-in NAME] [--resume]
    python studies/mutants.py table

A mutant changes one place: a comparison, an arithmetic or logical operator, a constant, a condition, a
returned value, or a call whose result nobody uses. ``drawn.tsv`` names each by its function and its
source text, so that it is found again after code has moved. If the text is gone, a place in the function
of that name or in the module that took its place replaces it, and is counted apart.

All mutants of a tree stand in one copy of it, each behind a question that a builtin answers; one run of
the tests notes which test reaches which question, in child processes, too. Then each mutant is switched
on in a fork of one process that has torch (in a process of its own if a module asks while it is
imported), and the tests that reach it run until the first one fails: the one that killed it in another
tree first, then those named after its module, then the quick ones, 150 at most: one that outlives them
may still meet a slower one, in a whole run of the tests.
``--killed-in NAME`` tries those alone that were killed in another run; the others count as alive. What
Ctrl-C leaves is kept, and ``--resume`` tries the others of that name. Files
with compiled kernels are left out: the question cannot stand in their files. A mutant that outlives its
limit of time counts as killed.

After the first runs, tests were written for mutants of this draw that had outlived them. From then on
its shares say less of the tests than a new draw (another ``SEED``) would.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results"
DRAWN, OUTCOMES = RESULTS / "mutants-drawn.tsv", RESULTS / "mutants.json"
FOLDERS = ("numerics", "recording", "runs", "analysis", "training")
PER_FOLDER = 40
SEED = 28
LIMIT_S = 600
MOST_TESTS = 150
KERNELS = re.compile(
    r"^ *(from|import) (numba|triton|llvmlite|mpdiag\S*\.compiled)\b", re.MULTILINE
)
LEFT_OUT = ("tests/app/test_browser", "tests/reports/documents/test_in_a_browser", "tests/docs")

COMPARISONS = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==",
               "Is": "is not", "IsNot": "is", "In": "not in", "NotIn": "in"}  # fmt: skip
ARITHMETIC = {"Add": "-", "Sub": "+", "Mult": "/", "Div": "*", "FloorDiv": "*", "Mod": "*",
              "LShift": ">>", "RShift": "<<", "BitAnd": "|", "BitOr": "&"}  # fmt: skip

ASKED = """
import builtins, os
_on, _hits, _seen = int(os.environ.get("MUTANT", "-1")), os.environ.get("MUTANT_HITS"), set()
_asked = set()
def __mutant__(i):
    _asked.add(i)
    if _hits:
        key = (i, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        if key not in _seen:
            _seen.add(key)
            with open(f"{_hits}/{os.getpid()}", "a") as file:
                file.write(f"{i}\\t{key[1]}\\n")
    return i == _on
def _switch(i):
    global _on
    _on = i
builtins.__mutant__, builtins.__switch__, builtins.__asked__ = __mutant__, _switch, _asked
"""


@dataclass(frozen=True)
class Mutant:
    """One changed place: where it stands, its text and what replaces it."""

    number: int
    folder: str
    module: str
    function: str
    text: str
    mutated: str
    line: str
    replaced: bool = False


@dataclass(frozen=True)
class Place:
    """A mutant in the text of a file."""

    start: int
    end: int
    function: str
    text: str
    mutated: str
    line: str


# -- where a mutant can stand ----------------------------------------------------------------------


class _Places(ast.NodeVisitor):
    """Collects the places of one module, with the function that each stands in."""

    def __init__(self, source: str) -> None:
        self.raw, self.lines = source.encode(), source.splitlines()
        self.starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.function = ""
        self.found: list[Place] = []

    def span(self, node: ast.expr) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def add(self, node: ast.expr, mutated: str) -> None:
        if self.function:
            line = self.lines[node.lineno - 1].strip()
            self.found.append(
                Place(*self.span(node), self.function, self.text(node), mutated, line)
            )

    def generic_visit(self, node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list", "pattern"):
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        outer, self.function = self.function, f"{self.function}.{node.name}".lstrip(".")
        for statement in node.body:
            self.visit(statement)
        self.function = outer

    visit_ClassDef = visit_FunctionDef

    def skip(self, node: ast.AST) -> None:
        """What is said is no place for a mutant."""

    visit_Raise = visit_Assert = visit_JoinedStr = skip

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            other = COMPARISONS[type(node.ops[0]).__name__]
            self.add(node, f"{self.text(node.left)} {other} {self.text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op).__name__)
        if other:
            self.add(node, f"({self.text(node.left)}) {other} ({self.text(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, word.join(f"({self.text(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, self.text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is bool:
            self.add(node, repr(not node.value))
        elif type(node.value) in (int, float):
            self.add(node, repr(node.value + 1))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" not in _names(node.test):
            self.add(node.test, f"not ({self.text(node.test)})")
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self.add(node.value, "None")
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node.value, "None")
            self.visit(node.value)


def _names(node: ast.AST) -> set[str]:
    inside = ast.walk(node)
    return {getattr(n, "id", getattr(n, "attr", "")) for n in inside}


def places(source: str) -> list[Place]:
    """Every place of a module where a mutant can stand."""
    visitor = _Places(source)
    visitor.visit(ast.parse(source))
    return visitor.found


def modules(tree: Path, folder: str) -> list[Path]:
    files = sorted((tree / "mpdiag" / folder).rglob("*.py"))
    return [path for path in files if not KERNELS.search(path.read_text())]


def draw() -> None:
    """Draw the mutants of this checkout."""
    chance, rows = random.Random(SEED), []  # noqa: S311 - drawn, not secret
    for folder in FOLDERS:
        pool = [(path, place) for path in modules(ROOT, folder)
                for place in places(path.read_text())]  # fmt: skip
        taken: list[tuple[Path, Place]] = []
        while len(taken) < PER_FOLDER:
            path, place = chance.choice(pool)
            if all(p != path or b.end <= place.start or place.end <= b.start for p, b in taken):
                taken.append((path, place))
        for path, place in taken:
            module = path.relative_to(ROOT).as_posix()
            rows.append(Mutant(len(rows), folder, module, place.function, place.text,
                               place.mutated, place.line))  # fmt: skip
    with DRAWN.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(field.name for field in fields(Mutant))
        writer.writerows(asdict(row).values() for row in rows)
    print(f"{len(rows)} mutants: {DRAWN}")


def drawn() -> list[Mutant]:
    with DRAWN.open(newline="") as file:
        return [Mutant(int(row["number"]), **{k: row[k] for k in
                ("folder", "module", "function", "text", "mutated", "line")})
                for row in csv.DictReader(file, delimiter="\t")]  # fmt: skip


# -- one tree with all of them ---------------------------------------------------------------------


def find(mutants: list[Mutant], tree: Path) -> dict[int, tuple[Path, Place, Mutant]]:
    """Each mutant's place in a tree: its own, or one in what took its place."""
    everywhere = {path: places(path.read_text()) for path in modules(tree, "")}
    result: dict[int, tuple[Path, Place, Mutant]] = {}
    taken: dict[Path, list[Place]] = {path: [] for path in everywhere}

    def free(path: Path, place: Place) -> bool:
        return all(p.end <= place.start or place.end <= p.start for p in taken[path])

    def take(mutant: Mutant, options: list[tuple[Path, Place]], replaced: bool) -> bool:
        options = [(path, place) for path, place in options if free(path, place)]
        if not options:
            return False
        chance = random.Random(mutant.number)  # noqa: S311 - drawn, not secret
        path, place = chance.choice(options) if replaced else options[0]
        taken[path].append(place)
        module = path.relative_to(tree).as_posix()
        new = Mutant(mutant.number, mutant.folder, module, place.function, place.text,
                     place.mutated, place.line, replaced)  # fmt: skip
        result[mutant.number] = (path, place, new)
        return True

    for exact in (True, False):
        for mutant in mutants:
            if mutant.number in result:
                continue
            last = mutant.function.rpartition(".")[2]
            near = sorted(everywhere, key=lambda path: _distance(path, tree, mutant.module))
            same = [(path, place) for path in near for place in everywhere[path]
                    if place.function.rpartition(".")[2] == last]  # fmt: skip
            if exact:
                alike = [(path, p) for path, p in same
                         if (p.text, p.mutated) == (mutant.text, mutant.mutated)]  # fmt: skip
                alike.sort(key=lambda pair: pair[1].line != mutant.line)
                take(mutant, alike, False)
            else:
                own = [(near[0], place) for place in everywhere[near[0]]]
                folder = [(p, place) for p in near if f"/mpdiag/{mutant.folder}/" in p.as_posix()
                          for place in everywhere[p]]  # fmt: skip
                _ = (take(mutant, [s for s in same if s[0] == near[0]], True)
                     or take(mutant, same, True) or take(mutant, own, True)
                     or take(mutant, folder, True))  # fmt: skip
    return result


def _distance(path: Path, tree: Path, module: str) -> tuple[int, str]:
    here, there = path.relative_to(tree).parts, Path(module).parts
    shared = 0
    while here[:shared] == there[:shared] and shared < min(len(here), len(there)):
        shared += 1
    return (-(10 * (here == there) + 2 * (here[-1] == there[-1]) + shared), path.as_posix())


def build(tree: Path, copy: Path) -> dict[int, Mutant]:
    """A copy of a tree in which each mutant stands behind its question."""
    parts = ("mpdiag", "app", "tests", "sample_runs", "studies", "benchmarks", "docs", "examples")
    for part in parts:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(tree / part, copy / part, ignore=ignored)
    for path in tree.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    by_path: dict[Path, list[tuple[Place, Mutant]]] = {}
    for path, place, mutant in find(drawn(), copy).values():
        by_path.setdefault(path, []).append((place, mutant))
    for path, inside in by_path.items():
        raw = path.read_bytes()
        for place, mutant in sorted(inside, key=lambda pair: -pair[0].start):
            new = f"(({place.mutated}) if __mutant__({mutant.number}) else ({place.text}))"
            raw = raw[: place.start] + new.encode() + raw[place.end :]
        ast.parse(raw)
        path.write_bytes(raw)
    root = copy / "mpdiag" / "__init__.py"  # whoever imports any part imports it first
    text = root.read_text()
    first = text.index("\nimport ")
    root.write_text(text[:first] + ASKED + text[first:])
    processes = copy / "tests" / "script_processes.py"
    text = processes.read_text()
    current = '"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")'
    processes.write_text(text.replace('"env": env}', f'"env": {{**env, {current}}}}}'))
    return {mutant.number: mutant for inside in by_path.values() for _, mutant in inside}


# -- the tests that reach them, and whether one fails ----------------------------------------------


def reached(copy: Path, workers: int, folders: Sequence[str]) -> dict[int, list[str]]:
    """The tests that reach each mutant, from one run of them all; quick ones first.

    Raises:
        RuntimeError: If hardly any test passes in the copy: then no outcome says anything.
    """
    hits, report = copy / "hits", copy / "times.xml"
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    ignored = [f"--deselect={part}" for part in LEFT_OUT]
    environment = {**os.environ, "PYTHONPATH": str(copy), "MUTANT_HITS": str(hits),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile",
               "-p", "no:cacheprovider", f"--junitxml={report}", *ignored, *folders]  # fmt: skip
    with (copy / "baseline.txt").open("w") as output:
        subprocess.run(command, cwd=copy, env=environment, stdout=output, check=False)
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - made above
    bad = {(c.get("classname"), c.get("name")) for c in cases if len(c)}
    if 2 * len(bad) > len(cases):
        message = (
            f"{len(bad)} of {len(cases)} tests failed or were skipped: see {copy}/baseline.txt"
        )
        raise RuntimeError(message)
    times = {(c.get("classname"), c.get("name")): float(c.get("time") or 0) for c in cases}
    named = {f"{(c.get('classname') or '').replace('.', '/')}.py::{c.get('name')}" for c in cases}
    by_mutant: dict[int, set[str]] = {}
    for path in hits.iterdir():
        for line in path.read_text().splitlines():
            number, _, test = line.partition("\t")
            if not test:  # asked as a module was imported: any test may depend on it
                by_mutant.setdefault(int(number), set()).update(named)
            elif not test.startswith(LEFT_OUT):
                by_mutant.setdefault(int(number), set()).add(test)

    def key(test: str) -> tuple[str, str]:
        file, _, name = test.partition("::")
        return (file.removesuffix(".py").replace("/", "."), name)

    return {number: sorted((t for t in tests if key(t) not in bad),
                           key=lambda t: times.get(key(t), 9.0))
            for number, tests in by_mutant.items()}  # fmt: skip


CHUNK = 60


def try_one(mutant: Mutant, tests: list[str]) -> dict[str, object]:
    """Switch one mutant on in a fork, and run what reaches it until a test fails.

    A test that also fails with the mutant switched off is left out.
    """
    stem = re.sub(r"^_", "", Path(mutant.module).stem)
    near = [t for t in tests if f"test_{stem}" in t]
    left = list(dict.fromkeys(tests[:1] + near + tests))[:MOST_TESTS]
    until = time.monotonic() + LIMIT_S
    while left:
        chunk, left = left[:CHUNK], left[CHUNK:]
        failed = _first_failure(mutant.number, chunk, until)
        if failed is None:
            continue
        if failed == TOO_LONG or _first_failure(-1, [failed], until + LIMIT_S) is None:
            return {"killed": True, "by": failed, "tests": len(tests)}
        left = chunk[chunk.index(failed) + 1 :] + left
    return {"killed": False, "by": "", "tests": len(tests)}


TOO_LONG = "the limit of time"
NONE_FOUND = 5


class _Chosen:
    """Runs some tests in their order, and tells the parent process which of them failed first.

    Their files are collected whole: pytest refuses an identifier that it does not find, and one that
    holds something drawn, or an address in memory, is another in each process.
    """

    def __init__(self, tests: Sequence[str], pipe: int) -> None:
        self.place = {test: i for i, test in enumerate(tests)}
        self.pipe = pipe

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place),
            key=lambda item: self.place[item.nodeid],
        )

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "outcome", "") == "failed":
            os.write(self.pipe, f"{getattr(report, 'nodeid', '')}\n".encode())


def _first_failure(number: int, tests: list[str], until: float) -> str | None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _run_tests(number, tests, write)
    os.close(write)
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return TOO_LONG
            time.sleep(0.02)
        code = os.waitstatus_to_exitcode(ended[1])
        if code in (0, NONE_FOUND):
            return None
        failed = os.read(read, 1 << 16).decode().splitlines()
        return failed[0] if failed else tests[0]  # a crash and an import that fails name no test
    finally:
        os.close(read)


def _run_tests(number: int, tests: list[str], pipe: int) -> None:
    os.setpgrp()
    os.environ["MUTANT"] = str(number)
    if number in __asked__:  # type: ignore[name-defined]  # noqa: F821 - a builtin of the copy
        os.set_inheritable(pipe, True)  # asked as its module was imported: import it again
        os.execv(sys.executable, [sys.executable, __file__, "tests", str(pipe), *tests])  # noqa: S606
    __switch__(number)  # type: ignore[name-defined]  # noqa: F821 - likewise
    _ask_pytest(tests, pipe)


def _ask_pytest(tests: list[str], pipe: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import pytest

    code = 1
    try:
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = int(pytest.main([*words, *files], plugins=[_Chosen(tests, pipe)]))
    finally:
        os._exit(code)


def serve(copy: Path, part: str, result: Path) -> None:
    """Try some mutants in a process whose mpdiag is the copy's; called by ``run``."""
    for name in ("mpdiag", "pandas", "torch._dynamo"):  # what every fork would import
        import_module(name)
    os.chdir(copy)
    work = json.loads((copy / f"{part}.json").read_text())
    for mutant, tests in work:
        outcome = try_one(Mutant(**mutant), tests)
        with result.open("a") as file:
            file.write(json.dumps({**mutant, **outcome}) + "\n")


def run(options: argparse.Namespace) -> None:
    """Try the mutants of some folders in a tree; the outcomes are kept under a name."""
    tree, workers = options.tree.resolve(), options.workers
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    mutants = build(tree, copy)
    tests = reached(copy, workers, options.tests)
    chosen = [n for n in sorted(mutants) if mutants[n].folder in options.only]
    outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.is_file() else {}
    killers = {row["number"]: row.get("by") for rows in outcomes.values() for row in rows}
    alive = {row["number"] for row in outcomes.get(options.killed_in, []) if not row["killed"]}
    earlier = {row["number"] for row in outcomes.get(options.name, []) if options.resume}
    work = [(asdict(mutants[n]), sorted(tests.get(n, []), key=lambda test: test != killers.get(n)))
            for n in chosen if n not in alive | earlier]  # fmt: skip
    result = copy / "outcomes.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    children = []
    for w in range(workers):
        (copy / f"part{w}.json").write_text(json.dumps(work[w::workers]))
        command = [sys.executable, str(Path(__file__).resolve()), "serve", str(copy), f"part{w}"]
        children.append(subprocess.Popen([*command, str(result)], env=environment))
    try:
        for child in children:
            child.wait()
    except KeyboardInterrupt:
        for child in children:
            child.kill()
    untried = [{**asdict(mutants[n]), "killed": False} for n in chosen if n in alive]
    tried = result.read_text().splitlines() if result.exists() else []
    asked = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.check_output(asked, text=True).strip()
    at = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    new = [{**row, **at} for row in (*untried, *map(json.loads, tried))]
    known = {row["number"]: row for row in [*outcomes.get(options.name, []), *new]}
    outcomes[options.name] = [known[n] for n in sorted(known)]
    OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n")
    shutil.rmtree(copy)
    table()


def table() -> None:
    """Share killed by folder, for every run kept; replaced mutants apart."""
    for name, rows in json.loads(OUTCOMES.read_text()).items():
        print(name, *sorted({row["commit"] for row in rows}))
        for folder in FOLDERS:
            own = [r for r in rows if r["folder"] == folder and not r["replaced"]]
            new = [r for r in rows if r["folder"] == folder and r["replaced"]]
            killed = Counter(r["killed"] for r in own)[True]
            again = Counter(r["killed"] for r in new)[True]
            print(f"  {folder:10} {killed} of {len(own)} killed; replaced {again} of {len(new)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["draw", "run", "table", "serve", "tests"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--name", default="now")
    parser.add_argument("--killed-in", metavar="NAME")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=FOLDERS)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders of tests")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.what == "draw":
        draw()
    elif options.what == "run":
        run(options)
    elif options.what == "table":
        table()
    elif options.what == "tests":
        pipe, *tests = options.words
        _ask_pytest(tests, int(pipe))
    else:
        copy, part, result = options.words
        serve(Path(copy), part, Path(result))


if __name__ == "__main__":
    main()
