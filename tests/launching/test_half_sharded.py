"""Scripts on two ranks that ask for half precision: named, and recorded in FP32 with ``--fp32``."""

import json

import pytest
from script_processes import SCRIPTS
from support import NEEDS_GLOO

from mpdiag.analysis.analyzer import analyze
from mpdiag.precision.audit import audit
from mpdiag.runs.run import open_run

pytestmark = NEEDS_GLOO

SCRIPT = SCRIPTS / "half_sharded.py"
POLICY = "(param_dtype=bfloat16, reduce_dtype=bfloat16"
KINDS = {
    "fsdp2": f"FSDP2's MixedPrecisionPolicy {POLICY})",
    "fsdp1": f"FSDP1's MixedPrecision {POLICY}, buffer_dtype=bfloat16)",
    "fsdp2-weights": "the bfloat16 weights of FSDPSequential",
    "ddp-hook": "DDP's fp16_compress_hook at ",
}


@pytest.mark.parametrize("kind", KINDS)
def test_with_fp32_it_is_the_training_that_asked_for_nothing_bit_for_bit(
    kind, fork_server, tmp_path
):
    twin, other = fork_server.ranks("python", SCRIPT, kind, "fp32", cwd=tmp_path)
    assert (twin.code, other.code) == (0, 0), twin.err
    record = ("record", "--fp32", "--every", "1", "--out", "run", "--", SCRIPT, kind)
    done, other = fork_server.ranks("mpdiag", *record, cwd=tmp_path)
    assert (done.code, other.code) == (0, 0), done.err
    assert done.digest == twin.digest
    run = open_run(tmp_path / "run")
    assert run.meta["precision"].get("not_switched_off") is None
    assert any(w.startswith(KINDS[kind]) for w in run.meta["precision"]["switched_off"])
    assert f"--fp32 switches off {KINDS[kind]}" in done.err
    assert "--fp32" not in other.err
    assert "not-fp32" not in {f.code for f in analyze(run).findings}


def test_sharded_weights_keep_who_cast_them(fork_server, tmp_path):
    record = ("record", "--every", "1", "--out", "run", "--", SCRIPT, "fsdp2-cast")
    done, other = fork_server.ranks("mpdiag", *record, cwd=tmp_path)
    assert (done.code, other.code) == (0, 0), done.err
    found = {p.set_by for p in audit(tmp_path / "run").parameters}
    (words,) = found
    assert words.startswith("Sequential.bfloat16() at ")
    assert "half_sharded.py:" in words


def test_without_fp32_the_policy_is_named_and_how_to_switch_it_off(fork_server, tmp_path):
    record = ("record", "--every", "1", "--out", "run", "--", SCRIPT, "fsdp2")
    done, other = fork_server.ranks("mpdiag", *record, cwd=tmp_path)
    assert (done.code, other.code) == (0, 0), done.err
    analysis = analyze(open_run(tmp_path / "run"))
    (finding,) = (f for f in analysis.findings if f.code == "not-fp32")
    assert finding.message.startswith("FSDP2's MixedPrecisionPolicy casts the weights to bfloat16")
    assert finding.fix.startswith("record again with --fp32 ")
    assert analysis.verdict.level == "expected"
    assert analysis.loss_scale.bounds is not None
    assert "FSDP2's MixedPrecisionPolicy casts its weights" in analysis.verdict.text


def test_a_loop_that_records_itself_trains_the_same_and_each_rank_has_its_series(
    fork_server, tmp_path
):
    plain, _ = fork_server.ranks("python", SCRIPT, "fsdp2", cwd=tmp_path)
    done, other = fork_server.ranks("python", SCRIPT, "fsdp2", "half", "run", cwd=tmp_path)
    assert (done.code, other.code) == (0, 0), done.err
    assert done.digest == plain.digest
    line = "FP32 weights and AdamW states; FSDP2's MixedPrecisionPolicy computes in BF16"
    assert f"mpdiag: {line}\n" in done.err
    assert "mpdiag: " not in other.err
    for name in ("series.jsonl", "series.rank00001.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(8))
        assert all(row["mpdiag/update_ratio"] > 0 for row in rows)
