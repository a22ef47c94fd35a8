"""Differences in units in the last place, as the benchmark of compiled recordings states them."""

import sys

import pytest
import torch


@pytest.fixture
def compiled(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "studies"))
    monkeypatch.syspath_prepend(str(root / "benchmarks"))  # the first: a study has this name, too
    for file in (root / "benchmarks").glob("*.py"):  # and folders of tests have names of benchmarks
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    import compiled

    return compiled


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, -2.0], [1.0, -2.0 - 2**-22], 1),
        ([0.0], [-(2.0**-149)], 1),
        ([-(2.0**-149)], [2.0**-149], 2),
        ([0.0], [-0.0], 0),
        ([1.0], [2.0], 2**23),
    ],
)
def test_ulps_count_the_fp32_values_between(compiled, tmp_path, first, second, difference):
    for name, values in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        weights = {"weight": torch.tensor(values), "steps": torch.tensor(3)}
        torch.save(weights, tmp_path / name / "weights-0.pt")
    assert compiled.ulps(tmp_path / "a", tmp_path / "b") == difference
