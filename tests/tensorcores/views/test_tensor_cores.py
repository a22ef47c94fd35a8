"""The profile's tables, figures and receipts: every microsecond in its place."""

import json
from dataclasses import replace

import pytest
from made_profiles import profile, profile_with_use, profile_with_work
from receipt_checks import same_numbers

from mpdiag.runs.results import read_profile
from mpdiag.tensorcores.views import tensor_cores
from mpdiag.tensorcores.views.tensor_core_use import cause_costs, step_frame, steps, summary_of


def test_time_by_verdict_adds_up(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(profile()))
    read = read_profile(tmp_path)
    frame = tensor_cores.verdict_frame(read)
    assert tuple(frame["verdict"]) == tensor_cores.VERDICTS
    assert frame["time_us"].sum() == read["kernel_time_us"]
    shares = frame.set_index("verdict")["share"]
    assert shares["tensor_core"] == read["tensor_core_fraction"]
    assert dict(tensor_cores.headline(read))["On Tensor Cores"] == 0.6
    assert dict(tensor_cores.headline({"kernels": read["kernels"]}))["Layout conversion"] == 0.15


def test_misaligned_shapes_have_a_padded_size():
    frame = tensor_cores.operation_frame(profile()).set_index("module")
    assert frame.loc["<i>head</i>", "padded"] == "40 × 72 × 64"
    assert frame.loc["stem", "padded"] == "8 × 8 × 8"
    assert frame.loc["body", "padded"] == ""
    assert list(tensor_cores.fixable(frame.reset_index())["module"]) == ["<i>head</i>", "stem"]


def test_the_profile_s_own_advice_goes_first():
    row = {"m": 33, "n": 65, "k": 64, "dtype": "fp16", "fix": "pad", "amdahl_bound": None}
    advice = [{"dimension": "N", "size": 65, "padded": 72}]
    rows = [{**row, "padded": advice}, {**row, "padded": []}, {**row, "aligned": None}]
    frame = tensor_cores.operation_frame({"operations": rows})
    assert list(frame["padded"]) == ["N: 65 → 72", "", ""]
    assert (frame["amdahl_bound"] == float("inf")).all()  # null in JSON


def test_a_cpu_has_units_of_its_own():
    labels = [label for label, _ in tensor_cores.headline({"device": {"type": "cpu"}})]
    assert labels[:2] == ["On AMX", "Matrix work on vector units"]
    kernel = {"name": "matmul brg:avx2", "verdict": "cuda_core", "time_us": 1.0}
    rows = {"kernels": [kernel, {**kernel, "verdict": "layout"}]}

    def units(device):
        return list(tensor_cores.kernel_frame(rows | {"device": device})["unit"])

    assert units({"type": "cpu"}) == ["vector units", "layout conversion"]
    assert units({"generation": "cdna"}) == ["vector units", "layout conversion"]
    assert units({"generation": "hopper"}) == ["CUDA cores", "layout conversion"]


def test_figures_of_an_amd_gpu_name_its_units():
    devices = ({}, {"generation": "cdna"}, {"name": "AMD Radeon RX 7900 XTX", "generation": None})
    for device, named in zip(devices, ("tensor cores", *["matrix cores"] * 2), strict=True):
        read = profile_with_use() | {"device": device}
        (picture,) = steps("runs/a", read)
        drawn = picture.figure.to_json().lower()
        assert f'"{named}"' in drawn
        (other,) = {"tensor cores", "matrix cores"} - {named}
        assert other not in drawn


def test_fixes_add_up_as_amdahl_has_it():
    assert tensor_cores.combined_bound([]) == 1.0
    assert tensor_cores.combined_bound([1.25]) == pytest.approx(1.25)  # 200 of 1000 µs gone
    assert tensor_cores.combined_bound([1.25, 1 / 0.85]) == pytest.approx(1000 / 650)
    assert tensor_cores.combined_bound([2.0, 2.0]) == float("inf")


def test_a_profile_of_nothing():
    for empty in ({}, {"kernels": [], "operations": []}, {"kernels": [{"name": "x"}]}):
        assert tensor_cores.verdict_frame(empty)["time_us"].sum() == 0
        assert tensor_cores.verdicts("RUN", empty).figure.layout.annotations
        assert tensor_cores.fixable(tensor_cores.operation_frame(empty)).empty


def test_what_is_no_matrix_work_is_one_fix_and_no_choice_of_its_own():
    outside = {"cause": "outside", "fix": "compile", "amdahl_bound": 1.25, "time_us": 200.0}
    rows = [outside | {"op": "add"}, outside | {"op": "relu"}]
    assert tensor_cores.fixable(tensor_cores.operation_frame({"operations": rows})).empty
    product = {"cause": "tf32_off", "fix": "allow", "amdahl_bound": 1.25, "op": "mm"}
    found = tensor_cores.fixable(tensor_cores.operation_frame({"operations": [*rows, product]}))
    assert list(found["op"]) == ["mm", "2 operations that are not matrix work"]
    assert found["amdahl_bound"].tolist() == pytest.approx([1.25, 1000 / 600])


MADE = {"plain": profile, "with work": profile_with_work, "with use": profile_with_use}
KEYS = {
    "plain": ["verdicts"],
    "with work": ["verdicts"],
    "with use": ["verdicts", "steps"],
    "digits": ["verdicts"],
    "gpu-sample": ["verdicts", "steps"],
}


@pytest.mark.parametrize("name", KEYS)
def test_every_receipt_gives_the_numbers_and_names_are_text(root, tmp_path, name):
    folder = root / "sample_runs" / name
    if name in MADE:
        folder = tmp_path
        (folder / "profile.json").write_text(json.dumps(MADE[name]()))
    document = json.loads((folder / "profile.json").read_text())
    pictures = list(tensor_cores.pictures(str(folder), document))
    assert [picture.key for picture in pictures] == KEYS[name]
    for picture in pictures:
        if picture.frame.empty:
            assert picture.figure.layout.annotations  # a sentence
            continue
        shown = picture.figure.to_json().replace("\\u003c", "<")
        assert not any(tag in shown for tag in ("<i>", "<b>gemm", "<b>simt", "<b>TF32"))
        if picture.key == "verdicts":  # which has a row for each that is absent, too
            frame = picture.frame[picture.frame["time_us"] > 0]
            picture = replace(picture, frame=frame.sort_values("verdict", ignore_index=True))
        same_numbers(picture)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"timeline": None, "summary": None, "causes": None},
        {"timeline": {"steps": [None, {}, {"kernel_us": 3}]}, "summary": [3], "causes": [None]},
    ],
)
def test_older_and_odd_documents_show_nothing(odd):
    given = profile() | odd
    assert list(steps(".", given)) == cause_costs(given | {"causes": [{"sentence": 3}]}) == []
    assert summary_of(given) == []
    assert step_frame(given).empty


def test_each_cause_has_its_share_its_bound_and_its_fix():
    (cost,) = cause_costs(profile_with_use())
    assert cost[0] == pytest.approx(0.62)
    assert cost[1] == "TF32 off: 5 operations, 62.0 % of kernel time, at most 2.63×"
    assert cost[2].startswith("allow <b>")


def test_idle_time_of_a_step_by_cause():
    timeline = profile_with_use()["timeline"]
    timeline["steps"][0]["idle_causes"] = {"host": {"time_us": 20.0}, "wait": {"time_us": 2.0}}
    frame = step_frame({"timeline": timeline})
    assert frame.iloc[0][["idle_host", "idle_wait", "idle_unknown"]].tolist() == [20.0, 2.0, 0.0]
    assert frame.iloc[1][["idle_host", "idle_unknown"]].tolist() == [0.0, 22.0]
