"""What is not installed is said in one sentence, with the line that installs it."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mpdiag import workloads
from mpdiag.cli import app
from mpdiag.installation.extras import EXTRAS, MissingExtra


def test_the_table_is_that_of_the_package(root):
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    optional = text.partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[
        0
    ]
    for extra in EXTRAS.values():
        asked = optional.partition(f"\n{extra.name} = [")[2].partition("]")[0]
        for package in extra.packages:
            assert f'"{package}>=' in asked, (extra.name, package)


def test_what_is_there_is_not_needed_and_what_fails_inside_is_told_as_it_is():
    EXTRAS["demo"].need()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), EXTRAS["demo"].imports("x"):
        import no_such_module  # noqa: F401


@pytest.mark.parametrize("name", ["lightning", "huggingface", "accelerate"])
def test_an_integration_without_its_library(name):
    extra = EXTRAS[name]
    package, module = next(iter(extra.packages.items()))
    lines = (
        f"import sys; sys.modules[{module!r}] = None",
        "try:",
        f"    import mpdiag.integrations.{name}",
        "except ImportError as error:",
        "    print(error)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    expected = f"mpdiag.integrations.{name} needs {package}: {extra.install}"
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("call", [["demo"], ["demo", "digits"], ["search", "digits"]])
def test_a_demo_without_its_data_leaves_nothing_behind(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 2
    assert "needs scikit-learn: pip install scikit-learn pillow" in result.stderr
    assert list(tmp_path.rglob("meta.json")) == []


@pytest.mark.parametrize("name", workloads.names())
def test_the_workloads_that_need_the_extra_say_so_when_they_are_loaded(name, monkeypatch):
    """And those that say nothing train without."""
    for module in [m for m in sys.modules if m.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    from mpdiag.workloads import digits

    digits.digit_images.cache_clear()
    try:
        workload = workloads.load(name)
    except MissingExtra:
        return
    assert next(workload.batches(1, 0)) is not None
