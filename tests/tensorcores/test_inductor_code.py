"""What inductor fused into a kernel, from code that inductor writes here, without a GPU."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from schemas import assert_described
from script_processes import scripts
from tensorcores.traces import H100, kernel, write

from mpdiag.tensorcores import profiled_script
from mpdiag.tensorcores.inductor_code import LOG_FOLDER, read_fused
from mpdiag.tensorcores.reports.gpu_profile import profile_text
from mpdiag.tensorcores.reports.trace_report import write_trace_report
from mpdiag.tensorcores.step_profiler import read_capture
from mpdiag.tensorcores.trace_analysis import profile_trace

SCRIPTS = scripts(__file__)

SCRIPT = SCRIPTS["script"]


def lines(*words):
    """Where the script has these comments."""
    source = SCRIPT.splitlines()
    return {i for i, line in enumerate(source, 1) if any(f"# {w}" in line for w in words)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with the cache and the log of a training that inductor compiled to Triton."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "script.py").write_text(SCRIPT)
    places = {"TORCHINDUCTOR_CACHE_DIR": "cache", "TORCH_TRACE": LOG_FOLDER}
    places = {name: str(folder / place) for name, place in places.items()}
    command = [sys.executable, str(folder / "script.py")]
    subprocess.run(command, check=True, env=os.environ | places, timeout=300)
    return folder


def named(fused, operation):
    """The kernels of an operation, without the number at the end of their names."""
    return {
        name.rpartition("_")[0]: kernel
        for name, kernel in fused.items()
        if f"aten.{operation}" in kernel.operations
    }


@pytest.mark.parametrize("place", ["cache", LOG_FOLDER])
def test_operations_lines_and_modules_of_real_kernels(compiled, place):
    fused = read_fused(compiled / place)
    assert {k.graphs for k in fused.values()} == {1}
    for name, found in fused.items():
        operations = {op.removeprefix("aten.").strip("_") for op in found.operations}
        assert operations
        assert all(op in name for op in operations)
        assert {Path(line.file).name for line in found.lines} == {"script.py"}
        text = SCRIPT.splitlines()
        assert all(text[line.line - 1].strip() == line.code for line in found.lines)
    first = named(fused, "native_layer_norm")["triton_per_fused_native_layer_norm"]
    assert {line.line for line in first.lines} == lines("normalised")
    both = named(fused, "native_layer_norm")["triton_per_fused_add_native_layer_norm_relu"]
    assert {line.line for line in both.lines} == lines("normalised", "activated")
    of_softmax = named(fused, "_softmax_backward_data")
    backward = of_softmax["triton_per_fused__softmax_backward_data_threshold_backward"]
    assert {line.line for line in backward.lines} == lines("ended", "activated")
    logged = place == LOG_FOLDER  # the cache has no names of parameters
    assert (first.modules, both.modules, backward.modules) == (
        (("blocks.0.layer_norm",), ("blocks.1.layer_norm",), ()) if logged else ((), (), ())
    )


def test_the_cache_and_the_log_of_one_run_are_one_run(compiled):
    together, logged = read_fused(compiled), read_fused(compiled / LOG_FOLDER)
    assert {k: set(v.lines) for k, v in together.items()} == {
        k: set(v.lines) for k, v in logged.items()
    }
    assert {v.graphs for v in together.values()} == {1}


GRAPH = SCRIPTS["graph"]


@pytest.mark.parametrize("words", ["Topologically Sorted ", "Unsorted ", ""])
def test_kernels_of_one_name_are_joined(tmp_path, words):
    for i, op in enumerate(["exp", "log", "exp"]):
        facts = {
            "op": op,
            "node": f"y_{op}",
            "line": 5 + i % 2,
            "sorted": words,
            "aot": "0_forward",
        }
        (tmp_path / f"{i}.py").write_text(GRAPH.format(**facts))
    (found,) = read_fused(tmp_path).items()
    assert found[0] == "triton_poi_fused_0"
    assert found[1].operations == ("aten.exp", "aten.log")
    assert [tuple(line) for line in found[1].lines] == [
        ("/home/me/net.py", 5, "y = exp(x / 2)"),
        ("/home/me/net.py", 6, "y = log(x / 2)"),
    ]
    assert found[1].graphs == 2  # the third is the first once more


LATER = '"frame_id": 1, "frame_compile_id": 1'


def test_a_log_with_a_graph_from_the_cache(compiled, tmp_path):
    """Then the graph is a record of its own kind, and its lines are those of an earlier script."""
    (log,) = (compiled / LOG_FOLDER).iterdir()
    earlier = log.read_text().replace("layer_norm(x)  # norm", "earlier(x)  # norm")
    before, after = (
        '{"artifact": {"name": "inductor_post_grad_graph"',
        '{"inductor_post_grad_graph"',
    )
    assert before in earlier
    graphs = earlier.replace(before, after + ': {"encoding": "string"').split("dynamo_output_graph")
    graphs[1] = graphs[1].replace("earlier(x)  # norm", "layer_norm(x)  # norm", 1)
    (tmp_path / "a.log").write_text("dynamo_output_graph".join(graphs))
    fresh, found = read_fused(compiled / LOG_FOLDER), read_fused(tmp_path)
    assert fresh.keys() == found.keys()
    for name, one in found.items():
        assert {line.line for line in one.lines} == {line.line for line in fresh[name].lines}
    first = named(found, "native_layer_norm")["triton_per_fused_native_layer_norm"]
    assert [line.code for line in first.lines] == ["h = self.layer_norm(x)  # normalised"]


def test_a_backward_name_is_not_taken_for_dynamos(tmp_path):
    """Dynamo's ``y_exp`` reads a module's weight; the backward graph's node of that name does not."""
    dynamo = (
        'V0101 00:00:00.0 1 torch/a.py:1] {"dynamo_output_graph": {}, FRAME}\n'
        "\t# File: /home/me/net.py:99 in forward, code: y = f(w)\n"
        '\ty_exp: "f32[4]" = torch.exp(l_self_modules_a_b_modules_0_parameters_weight_);  x = None\n'
    )
    record = 'V0101 00:00:00.0 1 torch/a.py:1] {"inductor_output_code": {}, FRAME}\n'
    for aot, modules in [("0_forward", ("a_b.0",)), ("0_backward", ())]:
        code = GRAPH.format(op="exp", node="y_exp", line=5, sorted="", aot=aot)
        log = dynamo + dynamo.replace("a_b", "other").replace("FRAME", LATER) + record + code
        (tmp_path / "a.log").write_text(log.replace("FRAME", LATER.replace("1", "0")))
        assert read_fused(tmp_path)["triton_poi_fused_0"].modules == modules


def test_a_profile_names_what_was_fused(compiled, tmp_path):
    fused = read_fused(compiled / LOG_FOLDER)
    name = next(name for name, found in fused.items() if found.modules)
    trace = write(tmp_path / "trace.json", [kernel(name, 1, 60), kernel("other", 2, 40)], H100)
    profile = profile_trace(trace, triton_code=compiled / LOG_FOLDER)
    document = profile.to_json()
    assert_described("profile", document)
    assert {k["name"]: k["fused"] for k in document["kernels"]} == {
        name: json.loads(json.dumps(fused[name].to_json())),
        "other": None,
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(profile_text(profile))
    page = write_trace_report(trace, tmp_path / "t.md", triton_code=compiled).read_text()
    place = fused[name].lines[0]
    for text in (console.export_text(), page.replace("\\", "")):
        assert f"script.py:{place.line}" in text
        assert fused[name].modules[0] in text
    plain = [k | {"fused": None} for k in document["kernels"]]
    assert read_capture(tmp_path, steps=1).to_json()["kernels"] == plain
    (tmp_path / LOG_FOLDER).symlink_to(compiled / LOG_FOLDER)
    assert read_capture(tmp_path, steps=1).to_json()["kernels"] == document["kernels"]


@pytest.mark.parametrize("own", [None, "mine"])
def test_a_profiled_script_logs_what_it_compiles(monkeypatch, tmp_path, own):
    seen = []

    def run(command, *, env, **_):
        seen.append(env["TORCH_TRACE"])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.delenv("TORCH_TRACE", raising=False)
    if own:
        monkeypatch.setenv("TORCH_TRACE", own)
    monkeypatch.setattr(profiled_script.subprocess, "run", run)
    (tmp_path / "a.py").write_text("")
    with pytest.raises(profiled_script.UsageError):
        profiled_script.profile_script([str(tmp_path / "a.py")], steps=1, warmup=0)
    assert Path(seen[0]).name == (own or LOG_FOLDER)
