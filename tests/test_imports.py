"""What importing the package costs: next to nothing until a name is used."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from source_texts import imported_names

import mpdiag

HEAVY = {"torch", "numpy", "pandas", "pyarrow", "plotly", "numba", "streamlit", "sklearn", "jinja2"}


def loaded_by(code: str) -> set[str]:
    """The modules a fresh interpreter has loaded after running some code."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules}, sep='\\n')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(child.stdout.split("\n"))
    assert "sys" in loaded
    return loaded


@pytest.mark.parametrize(
    "code",
    [
        "import mpdiag.workloads; mpdiag.workloads.names()",
        "from mpdiag.cli import app; app(['--help'], standalone_mode=False)",
    ],
    ids=["workloads.names()", "mpdiag --help"],
)
def test_loads_nothing_heavy(code):
    assert loaded_by(code) & HEAVY == set()


def test_analyzing_loads_no_more_than_it_needs(root):
    words = ["analyze", str(root / "sample_runs" / "ssd"), "--json"]
    code = f"""
import contextlib, io, sys
from mpdiag.cli import app
with contextlib.redirect_stdout(io.StringIO()):
    app({words!r}, standalone_mode=False)
print(*(name.replace(".", " ") for name in sys.modules), sep="\\n")
"""
    loaded = {name.replace(" ", ".") for name in loaded_by(code)}
    slow = {"mpdiag.commands.demo", "mpdiag.display.notebook"}
    assert loaded & (HEAVY - {"numpy", "pyarrow"} | slow) == set()
    assert {"numpy", "pyarrow.lib"} <= loaded


def test_a_heavy_import_would_be_seen():
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.parametrize("name", sorted(mpdiag._HOMES))
def test_public_name_resolves(name):
    assert getattr(mpdiag, name).__module__.startswith("mpdiag.")


def test_type_checkers_see_the_same_names(root):
    tree = ast.parse((root / "mpdiag" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == mpdiag._HOMES
    assert set(mpdiag.__all__) == {*mpdiag._HOMES, "__version__"}


def test_completion_offers_public_names_alone(real, root):
    code = "import mpdiag; mpdiag.open_run; print(*dir(mpdiag))"
    names = real("-c", code, cwd=root).out.split()
    assert {n for n in names if not n.startswith("_")} == {*mpdiag._HOMES}
    assert {"__version__", "__doc__", "__path__"} <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mpdiag' has no attribute 'recrod'"):
        mpdiag.recrod  # noqa: B018 - the look-up is the test


@pytest.mark.parametrize("folder", ["studies", "benchmarks", "examples", "sample_runs", "app"])
def test_scripts_import_what_is_there(root, folder):
    missing = [
        f"{path.relative_to(root)}: {module}.{name}"
        for path in sorted((root / folder).rglob("*.py"))
        for module, names in imported_names(path)
        for name in names
        if module.startswith("mpdiag")
        and not hasattr(import_module(module), name)
        and find_spec(f"{module}.{name}") is None
    ]
    assert missing == []
