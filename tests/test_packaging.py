"""The wheel: what is in it, and that it runs where no clone is near."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from zipfile import ZipFile

import pytest

from mpdiag.version import __version__

SAMPLES = "mpdiag/_sample_runs/"
SAMPLE_RUNS = ("digits", "gpu-sample", "ssd", "ssd-fp16-no-scale", "ssd-fp16-plan")
LARGEST = 2 * 2**20
"""Bytes of the wheel."""

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def output_of(command, **options):
    # A checkout on PYTHONPATH must not be found from a clean environment.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    child = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **options,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    output_of([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, root])
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel):
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The bin folder of a fresh environment: the wheel, and the dependencies installed here.

    The dependencies come by path, which brings neither this checkout nor its editable install: a
    .pth file inside a folder that was itself added by a .pth file is not read.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    bin_folder = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [*PIP, "--python", bin_folder / "python", "install", "--no-deps", "--no-index", wheel]
    output_of(pip)
    (site,) = folder.glob("**/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return bin_folder


def files_below(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_module_every_table_and_all_data_are_in_it_and_nothing_else(wheel, contents, root):
    info = f"mpdiag-{__version__}.dist-info"
    assert {name.split("/")[0] for name in contents} == {"mpdiag", info}
    files = [p for kind in ("py", "tsv", "txt") for p in (root / "mpdiag").rglob(f"*.{kind}")]
    templates = list((root / "mpdiag").glob("*/templates/*"))
    assert templates
    assert contents >= {str(p.relative_to(root)) for p in (*files, *templates)}
    assert contents >= {"mpdiag/py.typed", f"{info}/licenses/LICENSE"}
    assert contents >= {f"mpdiag/_app/{name}" for name in files_below(root / "app")}
    assert not [name for name in contents if "__pycache__" in name]
    assert wheel.stat().st_size < LARGEST


def test_only_a_few_sample_runs_are_in_it(contents, root):
    packed = {name.removeprefix(SAMPLES) for name in contents if name.startswith(SAMPLES)}
    assert {name.split("/")[0] for name in packed} == {"README.md", *SAMPLE_RUNS}
    for run in SAMPLE_RUNS:
        files = files_below(root / "sample_runs" / run)
        assert {f"{run}/{name}" for name in files} <= packed


def test_it_runs_in_a_clean_environment(clean, tmp_path):
    where = "import mpdiag, mpdiag.runs.run; print(mpdiag.__file__)"
    assert str(clean.parent) in output_of([clean / "python", "-c", where], cwd=tmp_path)
    assert output_of([clean / "mpdiag", "--version"], cwd=tmp_path) == f"mpdiag {__version__}\n"
    assert "analyze" in output_of([clean / "mpdiag", "--help"], cwd=tmp_path)
    facts = json.loads(output_of([clean / "mpdiag", "doctor", "--json"], cwd=tmp_path))
    assert facts["mpdiag"] == __version__
    assert facts["packages"]["torch"]
    code = "from mpdiag.installation.bundled import sample_runs; print(sample_runs())"
    samples = output_of([clean / "python", "-c", code], cwd=tmp_path).strip()
    assert str(clean.parent) in samples
    found = json.loads(output_of([clean / "mpdiag", "runs", samples, "--json"], cwd=tmp_path))
    assert {run["name"] for run in found["runs"]} == set(SAMPLE_RUNS)
