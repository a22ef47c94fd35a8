"""The environment's facts, here and on machines that lack something."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch
from calls import printed, run

from mpdiag.hardware.devices import DeviceFacts, NvmlReading
from mpdiag.reports import machine
from mpdiag.reports.machine import environment_text
from mpdiag.version import __version__


def as_text(environment):
    return printed(environment_text(environment, verbose=True), width=120)


def test_one_screen_says_what_this_machine_can_do():
    found = machine.examine()
    lines = printed(environment_text(found)).splitlines()
    assert len(lines) <= 22 + len(found.devices) + len(found.gpus) + len(found.problems)
    for ability in found.abilities:
        assert any(ability.format.upper() in line and ability.how in line for line in lines)
    assert "With -v" in lines[-1]


def test_doctor_for_a_person_and_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nothing was recorded
    assert json.loads(run("doctor", "--json").stdout)["mpdiag"] == __version__
    told = run("doctor")
    assert f"python {sys.version.split()[0]}" in " ".join(told.stdout.split())
    assert (told.exit_code, told.stderr) == (0, "next: mpdiag demo\n")


def test_this_machine():
    found = machine.examine()
    assert found.packages["torch"] == version("torch")
    assert found.threads == torch.get_num_threads()
    assert len(found.devices) == torch.cuda.device_count()
    assert all(found.packages[name] for name in machine.REQUIRED)
    document = found.to_json()
    assert json.loads(json.dumps(document, allow_nan=False))["schema_version"] == 1


def test_a_package_that_is_missing_is_named_with_its_remedy(monkeypatch):
    def absent(name):
        if name in {"plotly", "streamlit"}:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(machine, "version", absent)
    found = machine.examine()
    assert machine.Problem("plotly is not installed", "pip install plotly") in found.problems
    assert not any("streamlit" in problem.message for problem in found.problems)
    assert "problem: plotly is not installed: pip install plotly" in as_text(found)
    row = next(line for line in as_text(found).splitlines() if "the dashboard" in line)
    assert "no" in row
    assert "pip install streamlit" in row


@pytest.mark.parametrize("broken", ["torch", "numba"])
def test_a_package_that_does_not_load_is_a_problem_not_a_traceback(monkeypatch, broken):
    def load(name):
        if name == broken:
            message = "libfoo.so.1: cannot\nopen [red]"
            raise OSError(message)
        return __import__(name)

    monkeypatch.setattr(machine, "import_module", load)
    found = machine.examine()
    assert found.problems[0].message == f"{broken} does not load: libfoo.so.1: cannot open [red]"
    assert (found.threads is None) == (broken == "torch")
    assert "cannot open [red]" in as_text(found)


@pytest.mark.gpu
def test_a_real_gpu():
    device = machine.examine().devices[0]
    assert device.name == torch.cuda.get_device_name(0)
    assert device.capability == "{}.{}".format(*torch.cuda.get_device_capability(0))


def test_a_machine_without_a_gpu_is_honest(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = machine.examine()
    how = {a.format: a.how for a in found.abilities}
    assert how["fp16"] == "emulated"
    assert how["tf32"] == how["fp8"] == "no"
    assert how["bf16"] in {"matrix unit", "vector unit", "emulated"}
    assert "no GPU: Tensor Cores cannot be used or verified here" in as_text(found)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (document["gpus"], len(document["abilities"])) == ([], 6)


def test_a_gpu_is_told_format_by_format(monkeypatch):
    facts = SimpleNamespace(name="NVIDIA A100[1]", major=8, minor=0, total_memory=80 * 2**30)
    gpu = DeviceFacts(facts.name, (8, 0), driver="550.54", throttling=("too hot",), power_watts=1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(machine.nvml, "read_nvml", lambda: NvmlReading((gpu,)))
    found = machine.examine()
    assert found.devices == (machine.Device(0, facts.name, "8.0", 80 * 2**30),)
    assert f"{facts.name}, compute capability 8.0, 80 GiB" in as_text(found)
    assert any("triton" in p.message for p in found.problems) == (found.packages["triton"] is None)
    how = {a.format: a.how for a in found.abilities}
    assert (how["tf32"], how["fp8"]) == ("tensor cores", "no")
    assert any(p.message == f"{facts.name}: too hot" for p in found.problems)
    assert "driver 550.54" in as_text(found)
    assert "no GPU" not in as_text(found)
    assert found.to_json()["gpus"][0]["generation"] == "ampere"
