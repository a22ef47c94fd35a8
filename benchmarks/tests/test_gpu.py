"""The command for GPUs: its runner, its table and its files, on made-up sections."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu_sections import (  # noqa: E402
    command,
    document,
    files,
    markdown,
    page,
    parts,
    programs,
    promises,
    runner,
)
from gpu_sections.child import Context, Hopeless  # noqa: E402

PART = parts.PARTS[0]
OWN = [p.id for p in promises.of_part(PART.key)]
FACTS = {"date": "today", "device": {"name": "Card"}, "versions": {"torch": "2"}}
SAY = "import sys;f=open(sys.argv[1],'a');f.write({!r}+chr(10));f.flush();"


def line(promise: str, held: bool | None = True, **more: object) -> str:
    return json.dumps({"promise": promise, "held": held, "figure": "1.00", **more})


def start(code: str, tmp_path, seconds: float = 20.0):
    """Run a made-up section: a program in place of the part's own."""
    words = [sys.executable, "-c", code, "REPORT"]
    places = {"keep": tmp_path, "cache": tmp_path / "cache"}
    return runner.run(PART, device="cpu", quick=False, seconds=seconds, words=words, **places)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def entered(ended, lines, mode: str = "full"):
    found = document.new(mode, FACTS, {})
    document.enter(found, PART.key, ended, lines)
    return found


# -- the table -------------------------------------------------------------------------------------


def test_every_promise_belongs_to_one_part_and_is_named_once():
    names = [p.id for p in promises.PROMISES]
    assert len(set(names)) == len(names)
    keys = [part.key for part in parts.PARTS]
    assert len(set(keys)) == len(keys)
    assert {p.part for p in promises.PROMISES} == set(keys)
    assert {p.section for p in promises.PROMISES} == set(promises.SECTIONS)
    assert all(p.section == p.part.partition("-")[0] for p in promises.PROMISES)
    assert all(p.sentence.endswith(".") and not p.shown_by.endswith(".") for p in promises.PROMISES)


def test_every_part_has_a_function():
    for part in parts.PARTS:
        source = (BENCHMARKS / "gpu_sections" / f"{part.module}.py").read_text(encoding="utf-8")
        assert f"\ndef {part.function}(ctx: Context)" in source


def test_parts_are_chosen_by_letter_and_by_name():
    assert [p.key for p in parts.chosen(["a", "b-steps"])] == ["a-counting", "b-steps"]
    assert parts.chosen(None) == parts.PARTS
    with pytest.raises(ValueError, match="there is no section 'z'"):
        parts.chosen(["z"])


# -- a section's process ---------------------------------------------------------------------------


def test_what_a_section_reports_is_entered(tmp_path):
    code = SAY.format(line(OWN[0])) + SAY.format(line(OWN[1], False, reason="off by one"))
    found = entered(*start(code, tmp_path))
    first, second, third = (found["promises"][name] for name in OWN[:3])
    assert (first["state"], first["figure"]) == ("held", "1.00")
    assert (second["state"], second["reason"]) == ("broken", "off by one")
    assert (third["state"], third["reason"]) == ("not testable", "its section did not come to it")
    assert document.done(found, PART.key)
    assert document.verdict(found) == 1


def test_a_crash_keeps_what_was_found_and_the_last_lines(tmp_path):
    code = SAY.format(line(OWN[0])) + "print('the last line',flush=True);import os;os.abort()"
    ended, lines = start(code, tmp_path)
    found = entered(ended, lines)
    assert ended["state"] == "crashed"
    assert "SIGABRT" in ended["reason"]
    assert "the last line" in ended["tail"]
    assert found["promises"][OWN[0]]["state"] == "held"
    assert "SIGABRT" in found["promises"][OWN[1]]["reason"]
    assert not document.done(found, PART.key)
    assert document.verdict(found) == 1
    assert "the last line" in markdown.report(found)


def test_a_section_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.0)
    sleeper = "import subprocess,sys,time;p=subprocess.Popen(['sleep','60']);"
    code = sleeper + SAY.format(line(OWN[0])) + "print(p.pid,flush=True);time.sleep(60)"
    began = time.monotonic()
    ended, lines = start(code, tmp_path, seconds=1.0)
    assert time.monotonic() - began < 10
    assert ended["state"] == "timed out"
    assert len(lines) == 1
    child = int(ended["tail"][-1])
    while alive(child):  # the end of a killed process takes a moment
        assert time.monotonic() - began < 10
        time.sleep(0.05)


def test_an_exit_code_is_said(tmp_path):
    ended, _ = start("raise SystemExit(7)", tmp_path)
    assert (ended["state"], ended["reason"]) == ("crashed", "ended with exit code 7")


def test_a_missing_package_is_named_with_its_sections(tmp_path):
    part = replace(PART, needs=("torch", "no_such_package"), wants=("nor_this",))
    assert runner.missing([part]) == {"no_such_package": [part.key], "nor_this": [part.key]}
    places = {"keep": tmp_path, "cache": tmp_path}
    ended, lines = runner.run(part, device="cpu", quick=False, seconds=5, **places)
    assert (ended["state"], lines) == ("not run", [])
    assert ended["reason"] == "needs no_such_package, which this Python lacks"


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    report = tmp_path / "report.jsonl"
    report.write_text(line(OWN[0]) + '\n{"promise": "a-')
    assert [x["promise"] for x in runner.lines(report)] == [OWN[0]]


# -- inside it -------------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path):
    return Context(PART.key, "cuda", False, tmp_path / "r.jsonl", tmp_path, time.monotonic() + 60)


def test_an_exception_breaks_what_was_not_settled_yet(context):
    with context.settling(*OWN[:2]):
        context.check(OWN[0], True, "1.00")
        raise ValueError("no such thing")
    first, second = runner.lines(context.report)
    assert (first["held"], second["held"]) == (True, False)
    assert "ValueError: no such thing" in second["reason"]


def test_too_little_memory_settles_nothing(context):
    import torch

    with context.settling(OWN[0]):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert runner.lines(context.report)[0]["held"] is None


def test_after_an_error_of_cuda_the_process_ends(context):
    with pytest.raises(Hopeless), context.settling(OWN[0]):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert runner.lines(context.report)[0]["held"] is False


def test_a_promise_of_another_part_is_refused(context):
    other = next(p.id for p in promises.PROMISES if p.part != PART.key)
    with pytest.raises(ValueError, match="not settled by"):
        context.check(other, True, "")


# -- a rehearsal settles nothing -------------------------------------------------------------------


def test_a_rehearsal_holds_and_breaks_nothing():
    kinds = {"exact": "a-counts", "aim": "b-every-cnn"}
    found = document.new("rehearsal", FACTS, {})
    for name in kinds.values():
        part = promises.named(name).part
        ended = {"state": document.FINISHED, "seconds": 1.0, "limit": 2.0}
        document.enter(found, part, ended, [{"promise": name, "held": False, "figure": "x"}])
    states = {k: found["promises"][name]["rehearsal"] for k, name in kinds.items()}
    assert states == {"exact": "failed", "aim": "ran"}
    assert set(document.counts(found).items()) >= {("held", 0), ("broken", 0)}
    assert document.verdict(found) == 1


def test_a_rehearsal_shows_no_figures_of_what_ran():
    found = document.new("rehearsal", FACTS, {})
    ended = {"state": document.FINISHED, "seconds": 1.0, "limit": 2.0}
    document.enter(
        found, "a-counting", ended, [{"promise": "a-speed", "held": False, "figure": "0.01"}]
    )
    rows = [row for row in markdown.table(found) if "copy bandwidth" in row]
    assert [row.split("|")[3:5] for row in rows] == [[" not testable; ran ", "  "]]


# -- programs and verdicts -------------------------------------------------------------------------


def test_a_program_is_ended_at_its_limit_though_its_child_holds_its_output(monkeypatch):
    monkeypatch.setattr(programs, "LEAST", 1.0)
    code = "import subprocess,time;print('begun',flush=True);"
    code += "subprocess.Popen(['sleep','20']);time.sleep(20)"
    began = time.monotonic()
    ran = programs.run([sys.executable, "-c", code], 0.0)
    assert time.monotonic() - began < 15
    assert (ran.code, ran.out) == (None, "begun\n")


def test_a_program_that_fails_says_why():
    ran = programs.run([sys.executable, "-c", "raise SystemExit('no such device')"], 20)
    with pytest.raises(RuntimeError, match="exit code 1: no such device"):
        ran.expect_success()


@pytest.mark.parametrize(
    ("tflops", "never", "by_name", "proof", "agrees"),
    [
        (700, False, "tensor_core", "tensor_core", True),
        (700, False, "cuda_core", "tensor_core", False),
        (700, False, "unknown", "tensor_core", None),
        (20, False, "cuda_core", None, None),
        (20, True, "cuda_core", "cuda_core", True),
        (20, True, "tensor_core", "cuda_core", False),
        (20, True, "none", "cuda_core", None),
    ],
)
def test_a_verdict_is_held_against_what_the_rate_proves(tflops, never, by_name, proof, agrees):
    from gpu_sections.matrix_cases import Case
    from gpu_sections.tensor_cores import verdict_of

    from mpdiag.hardware.devices import DeviceFacts

    case = Case("product", "fp16", 1.0, lambda: lambda: None, never)
    shares = {"tensor_core": "tensor_core", "cuda_core": "matrix_cuda_core", "unknown": "unknown"}
    found = {
        f"{name}_fraction{ending}": float(key == by_name)
        for key, name in shares.items()
        for ending in ("", "_witnessed")
    }
    facts = DeviceFacts("NVIDIA H100 80GB HBM3", (9, 0))
    row = verdict_of(case, tflops * 1e12, {**found, "kernels": []}, facts)
    assert (row["proof"], row["agrees"]) == (proof, agrees)


# -- files -----------------------------------------------------------------------------------------


def test_files_stay_within_their_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", files.RESULT_BYTES + 1500)
    keep, out = tmp_path / "keep", tmp_path / "out"
    (keep / "runs" / "small" / "stats").mkdir(parents=True)
    (keep / "runs" / "small" / "stats" / "part.parquet").write_bytes(b"x" * 100)
    for i in range(7):
        (keep / f"{i}.bin").write_bytes(b"x" * 10)
    (keep / "large.bin").write_bytes(b"x" * 2000)
    said = files.publish(keep, out / "gpu-card")
    written = sorted(p.name for p in out.iterdir())
    assert len(written) == files.MOST_FILES - files.RESULT_FILES
    assert all(name in said for name in written)
    assert "large.bin left out: 2,000 bytes are too much" in said
    assert sum(p.stat().st_size for p in out.iterdir()) <= 1500


def test_recorded_runs_become_one_archive(tmp_path):
    keep, out = tmp_path / "keep", tmp_path / "out"
    (keep / "runs" / "ssd").mkdir(parents=True)
    (keep / "runs" / "ssd" / "meta.json").write_text("{}")
    assert files.publish(keep, out / "gpu-card") == ["gpu-card-runs.zip"]


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch):
    """A machine with a card, and parts that report one promise each; yields the parts that ran."""
    ran: list[str] = []

    def run(part, *, seconds, **_):
        ran.append(part.key)
        first = promises.of_part(part.key)[0].id
        ended = {"state": document.FINISHED, "seconds": 0.1, "limit": seconds}
        if part.key == "h-fp8" and ran.count("h-fp8") == 1:
            ended |= {"state": "timed out", "reason": "was ended at its limit of 25 s", "tail": []}
        return ended, [{"promise": first, "held": True, "figure": "1.00"}]

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "warm", lambda *_: "nothing to compile")
    monkeypatch.setattr(command, "machine", lambda device: dict(FACTS))
    return ran


def test_a_pass_can_be_resumed(made_up, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--only", "h", "--only", "f"]
    assert command.main(words) == 1
    assert made_up == ["h-fp8", "f-device"]
    assert command.main([*words, "--resume"]) == 0
    assert made_up == ["h-fp8", "f-device", "h-fp8"]
    stored = document.load(tmp_path / "gpu-card.json")
    assert stored["parts"]["h-fp8"]["state"] == document.FINISHED
    assert stored["promises"]["f-nvml"]["state"] == "held"
    assert "finished in an earlier pass" in capsys.readouterr().out


def test_kernels_are_compiled_before_the_first_section_and_in_no_sections_time(
    made_up, tmp_path, monkeypatch
):
    clock = 0.0

    def warm(device, cache) -> str:
        nonlocal clock
        assert (device, made_up) == ("cuda", [])
        clock += 10_000.0
        return "Numba 10000 s"

    monkeypatch.setattr(runner, "warm", warm)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock)
    assert command.main(["--quick", "--out", str(tmp_path), "--only", "f"]) == 0
    assert made_up == ["f-device"]
    ended = document.load(tmp_path / "gpu-card-quick.json")["parts"]["f-device"]
    assert ended["limit"] == 15.0


@pytest.mark.parametrize(("device", "folder"), [("cpu", "REHEARSALS"), ("cuda", "RESULTS")])
def test_a_rehearsal_leaves_what_is_committed_alone(made_up, tmp_path, monkeypatch, device, folder):
    results, rehearsals = page.RESULTS, page.REHEARSALS
    committed = {p: p.read_bytes() for p in results.iterdir() if p.is_file()}
    monkeypatch.setattr(page, folder, tmp_path)
    monkeypatch.setattr(command.forks, "serving", lambda *_: nullcontext(None))
    assert command.main(["--device", device, "--only", "f"]) == 0
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".json", ".md"]
    assert {p: p.read_bytes() for p in results.iterdir() if p.is_file()} == committed
    ignored = (BENCHMARKS.parent / ".gitignore").read_text().splitlines()
    assert f"/{rehearsals.parent.name}/" in ignored


def test_warming_says_what_it_compiled_or_why_it_could_not(tmp_path, monkeypatch):
    assert runner.warm("cpu", tmp_path).startswith("Numba ")
    monkeypatch.setattr(runner, "WARM_SECONDS", 0.01)
    assert runner.warm("cpu", tmp_path) == "did not end within 0.01 s"


def test_a_quick_pass_leaves_parts_out_and_says_so(made_up, tmp_path):
    assert command.main(["--quick", "--out", str(tmp_path), "--only", "i"]) == 0
    assert made_up == []
    promise = document.load(tmp_path / "gpu-card-quick.json")["promises"]["i-gpt"]
    assert promise["reason"] == "its section is not part of a quick pass"


def test_what_no_longer_fits_is_not_started(made_up, tmp_path):
    assert command.main(["--minutes", "0.1", "--out", str(tmp_path), "--only", "a"]) == 1
    assert made_up == []
    promise = document.load(tmp_path / "gpu-card.json")["promises"][OWN[0]]
    assert promise["reason"] == "its section did not fit into the time of the pass"


def test_a_pass_that_is_stopped_keeps_what_it_has(made_up, tmp_path, monkeypatch, capsys):
    run = runner.run

    def stopped(part, **options):
        if part.key == "f-device":
            raise KeyboardInterrupt
        return run(part, **options)

    monkeypatch.setattr(runner, "run", stopped)
    words = ["--out", str(tmp_path), "--only", "a", "--only", "f", "--only", "g"]
    assert command.main(words) == 1
    stored = document.load(tmp_path / "gpu-card.json")
    assert list(stored["parts"]) == ["a-counting"]
    assert "go on with --resume" in capsys.readouterr().err


def test_what_a_stopped_part_had_reported_is_kept(monkeypatch, tmp_path, capsys):
    """A scheduler's polite end, while a part runs."""
    monkeypatch.setattr(command, "machine", lambda device: dict(FACTS))
    code = SAY.format(line(OWN[0])) + "import os,signal,time;os.kill(os.getppid(),signal.SIGTERM);"
    words = [sys.executable, "-c", code + "time.sleep(60)", "REPORT"]
    monkeypatch.setattr(runner, "command", lambda *_: words)
    before = signal.getsignal(signal.SIGTERM)
    assert command.main(["--out", str(tmp_path), "--only", "a", "--only", "b"]) == 1
    stored = document.load(tmp_path / "gpu-card.json")
    assert {key: part["state"] for key, part in stored["parts"].items()} == {PART.key: "stopped"}
    assert stored["promises"][OWN[0]]["state"] == "held"
    assert stored["promises"][OWN[1]]["reason"] == "its section was stopped"
    assert not document.done(stored, PART.key)
    assert "go on with --resume" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_quick_pass_leaves_a_full_one_alone(made_up, tmp_path):
    assert command.main(["--out", str(tmp_path), "--only", "f"]) == 0
    full = (tmp_path / "gpu-card.json").read_text()
    assert command.main(["--quick", "--out", str(tmp_path), "--only", "f"]) == 0
    assert (tmp_path / "gpu-card.json").read_text() == full
    assert document.load(tmp_path / "gpu-card-quick.json")["mode"] == "quick"


def test_results_of_another_torch_are_not_gone_on_with(made_up, tmp_path, monkeypatch):
    assert command.main(["--out", str(tmp_path), "--only", "f"]) == 0
    monkeypatch.setattr(command, "machine", lambda device: {**FACTS, "versions": {"torch": "3"}})
    assert command.main(["--out", str(tmp_path), "--only", "a"]) == 0
    assert list(document.load(tmp_path / "gpu-card.json")["parts"]) == ["a-counting"]


def test_an_unknown_section_is_a_usage_error(capsys):
    assert command.main(["--only", "z"]) == 2
    assert "there is no section 'z'" in capsys.readouterr().err


def test_limits_add_up():
    assert sum(p.quick for p in parts.PARTS) <= 1.5 * parts.QUICK_SECONDS
    assert sum(p.seconds for p in parts.PARTS) <= 2 * parts.FULL_SECONDS


def test_a_python_without_torch_is_told_so(tmp_path):
    """``-S`` leaves out installed packages: what a bare Python has."""
    words = [sys.executable, "-S", str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path)]
    child = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env={})
    assert child.returncode == 3, child.stderr
    assert "PyTorch is not installed" in child.stderr
    assert len(child.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# -- what is committed ------------------------------------------------------------------------------


def test_the_page_shows_the_last_pass():
    """After a pass: ``python benchmarks/gpu.py --docs``."""
    result = page.last_pass()
    assert result is not None
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.filled(text, result)
    assert set(result["promises"]) == {p.id for p in promises.PROMISES}


def test_a_card_comes_before_a_rehearsal(tmp_path):
    for name, mode, date in (("a", "full", "2026-01-01"), ("rehearsal", "rehearsal", "2026-02-02")):
        made = document.new(mode, {**FACTS, "date": date}, {})
        document.save(tmp_path / f"gpu-{name}.json", made)
    assert page.last_pass(tmp_path)["mode"] == "full"
