"""No module of torch is asked for its truth: a compiled one without ``__len__`` raises there.

A name or an attribute that is annotated as a module stands in no condition, ``not``, ``and`` or ``or``.
That nothing in a file is run is in ruff's rules: S, and what ``pyproject.toml`` bans.
"""

import ast
import re

import pytest

# A module itself, or None; no collection of modules, which may well be empty.
_MODULE = re.compile(r"((torch\.)?nn\.)?(Module|DistributedDataParallel)( \| None)?")


def _is_module(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("'\"")
    return _MODULE.fullmatch(text.replace("None | ", "")) is not None


def _annotations(tree: ast.AST):
    """Each annotated name or attribute of a piece of code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            target = node.target
            yield (
                target.attr if isinstance(target, ast.Attribute) else ast.unparse(target),
                (node.annotation),
            )


def _asked(tree: ast.AST):
    """Each expression whose truth is asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "bool":
            yield from node.args


def module_fields(sources: list[str]) -> set[str]:
    """Attributes that hold a module in every class that annotates them."""
    modules, others = set(), set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target).removeprefix("self.")
                (modules if _is_module(node.annotation) else others).add(name)
    return modules - others


def truth_tests(source: str, fields: set[str], name: str = "module") -> list[str]:
    """Where a piece of code asks for the truth of a module."""
    lines = []
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for function in functions:
        annotated = dict(_annotations(function))
        modules = {n for n, annotation in annotated.items() if _is_module(annotation)}
        for asked in _asked(function):
            local = isinstance(asked, ast.Name) and asked.id in modules
            field = isinstance(asked, ast.Attribute) and asked.attr in fields
            if local or field:
                lines.append(f"{name}:{asked.lineno} {ast.unparse(asked)}")
    return sorted(set(lines))


def test_no_module_is_asked_for_its_truth(root):
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("mpdiag", "app")
        for path in sorted((root / folder).rglob("*.py"))
    }
    fields = module_fields(list(sources.values()))
    assert "wrapper" in fields
    assert [line for name, s in sources.items() for line in truth_tests(s, fields, name)] == []


def asking(condition: str) -> str:
    return f"""
class Root:
    wrapper: nn.Module
def f(model: nn.Module, wrapper: torch.nn.Module | None, models: list[nn.Module], names: str):
    return {condition}
"""


@pytest.mark.parametrize(
    ("condition", "seen"),
    [
        *((c, True) for c in ("wrapper or model", "1 if model else 2", "not model", "bool(model)")),
        *((c, True) for c in ("[x for x in y if root.wrapper]", "x and root.wrapper")),
        *((c, False) for c in ("model is None", "models or x", "names and 1")),
    ],
)
def test_the_check_sees_modules_and_lets_others_pass(condition, seen):
    source = asking(condition)
    assert bool(truth_tests(source, module_fields([source]))) == seen
