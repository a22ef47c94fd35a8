"""No module of torch is asked for its truth: a compiled module without ``__len__`` raises there.

Read from the syntax trees: a name or an attribute that is annotated as a module stands in no condition,
``not``, ``and`` or ``or``.
"""

from __future__ import annotations

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
    paths = sorted((root / "mpdiag").rglob("*.py"))
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    fields = module_fields(list(sources.values()))
    assert "wrapper" in fields
    assert [line for name, s in sources.items() for line in truth_tests(s, fields, name)] == []


@pytest.mark.parametrize(
    "asked",
    [
        "wrapper or model",
        "1 if model else 2",
        "not model",
        "bool(model)",
        "[x for x in y if root.wrapper]",
        "x and root.wrapper",
    ],
)
def test_the_check_sees(asked):
    source = (
        "class Root:\n    wrapper: nn.Module\n"
        f"def f(model: nn.Module, wrapper: torch.nn.Module | None): return {asked}"
    )
    assert truth_tests(source, module_fields([source]))


@pytest.mark.parametrize("asked", ["model is None", "models or x", "names and 1"])
def test_the_check_lets_pass(asked):
    source = f"def f(model: nn.Module, models: list[nn.Module], names: str): return {asked}"
    assert truth_tests(source, module_fields([source])) == []
