"""What the code never does: run what a file says, or keep what a trace knows of its machine."""

from __future__ import annotations

import ast

import pytest

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


def test_nothing_that_a_file_says_is_run(root):
    found = []
    for path in [*(root / "mpdiag").rglob("*.py"), *(root / "app").rglob("*.py")]:
        name = str(path.relative_to(root))
        if name not in _SCRIPTS:
            found += offences(path.read_text(encoding="utf-8"), name)
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "np.load('x', allow_pickle=True)",
        "subprocess.run('x', shell=True)",
        "os.system('x')",
        "marshal.loads(b'')",
    ],
)
def test_the_check_sees(source):
    assert offences(source)


@pytest.mark.parametrize(
    "source", ["re.compile('x')", "torch.load('x', weights_only=True)", "model.eval()"]
)
def test_the_check_lets_pass(source):
    assert offences(source) == []
