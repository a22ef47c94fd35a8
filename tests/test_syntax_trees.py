"""What the code never does, read from its syntax trees.

It runs nothing that a file says. It asks no module of torch for its truth, as a compiled module without
``__len__`` raises there: a name or an attribute that is annotated as a module stands in no condition,
``not``, ``and`` or ``or``.
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


# Modules that make objects or code out of bytes. marshal is checked apart: it dumps keys, and is
# never asked to load.
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "yaml", "code"}
_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "loads_pickle"}
# Running a user's own script is what the launchers are for; Streamlit is started by its own name.
_SCRIPTS = {"mpdiag/launching/script.py"}


def offences(source: str, name: str = "module") -> list[str]:
    """Where a module imports or calls what could run a file's content."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]
            found += [
                f"{name}:{node.lineno} {n}" for n in names if n and n.split(".")[0] in _MODULES
            ]
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        owner = owner.id if isinstance(owner, ast.Name) else ""
        keywords = {k.arg: k.value for k in node.keywords}
        if called in _CALLS and owner in ("", "os", "builtins") and not _method(node):
            found.append(f"{name}:{node.lineno} {called}")
        if (owner, called) in {("marshal", "loads"), ("marshal", "load"), ("np", "fromregex")}:
            found.append(f"{name}:{node.lineno} {owner}.{called}")
        if called == "load" and owner == "torch":
            safe = keywords.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                found.append(f"{name}:{node.lineno} torch.load without weights_only=True")
        allowed = keywords.get("allow_pickle")
        if allowed is not None and getattr(allowed, "value", True) is not False:
            found.append(f"{name}:{node.lineno} allow_pickle")
        if "shell" in keywords:
            found.append(f"{name}:{node.lineno} shell")
    return found


def _method(node: ast.Call) -> bool:
    """``re.compile`` and the like: a method of something else."""
    return isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id in ("os", "builtins")
    )


def unsafe(source: str) -> list[str]:
    return offences(source) + truth_tests(source, module_fields([source]))


def test_nothing_that_a_file_says_is_run_and_no_module_is_asked_for_its_truth(root):
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("mpdiag", "app")
        for path in sorted((root / folder).rglob("*.py"))
    }
    fields = module_fields(list(sources.values()))
    assert "wrapper" in fields
    assert [line for name, s in sources.items() for line in truth_tests(s, fields, name)] == []
    assert [
        line for name, s in sources.items() if name not in _SCRIPTS for line in offences(s, name)
    ] == []


def asking(condition: str) -> str:
    return f"""
class Root:
    wrapper: nn.Module
def f(model: nn.Module, wrapper: torch.nn.Module | None, models: list[nn.Module], names: str):
    return {condition}
"""


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "eval('1')", "os.system('x')"),
        *("torch.load('x')", "torch.load('x', weights_only=False)", "marshal.loads(b'')"),
        *("np.load('x', allow_pickle=True)", "subprocess.run('x', shell=True)"),
        *map(asking, ("wrapper or model", "1 if model else 2", "not model", "bool(model)")),
        *map(asking, ("[x for x in y if root.wrapper]", "x and root.wrapper")),
    ],
)
def test_the_check_sees(source):
    assert unsafe(source)


@pytest.mark.parametrize(
    "source",
    [
        *("re.compile('x')", "torch.load('x', weights_only=True)", "model.eval()"),
        *map(asking, ("model is None", "models or x", "names and 1")),
    ],
)
def test_the_check_lets_pass(source):
    assert unsafe(source) == []
