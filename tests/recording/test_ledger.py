"""The ledger, when Ctrl-C falls anywhere in it."""

import os
import sys

import numpy as np
import torch

import mpdiag
from mpdiag.recording import ledger as ledger_module
from mpdiag.recording.counting import host
from mpdiag.recording.counting.tensors import countable
from mpdiag.recording.ledger import Ledger, ParameterUpdate
from mpdiag.runs.run import open_run
from mpdiag.runs.writer import RunWriter

STEPS = 4
OURS = {ledger_module.__file__, host.__file__}


def keep_books(ledger):
    """Four steps: one part after the first and one at the end, rows encoded in between."""
    for step in range(STEPS):
        for name in ("a", "b"):
            tensor = countable(torch.full((3,), float(step + 1)))
            ledger.note("activation", name, 0, tensor, ledger.count(tensor))
        before, after = (countable(torch.full((3,), v)) for v in (1.0, 1.5))
        ledger.note_updates([ParameterUpdate("a", before, after, "local")])
        ledger.close_step(step, 1.0, skipped=False)
        ledger.drain(at_least=1)
        if ledger.due:
            ledger.flush()
    ledger.flush()


class Interrupt:
    """Raises KeyboardInterrupt before the nth instruction of the ledger."""

    def __init__(self, nth):
        self.left = nth

    def __enter__(self):
        sys.settrace(self.enter_frame)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def enter_frame(self, frame, _event, _argument):
        if frame.f_code.co_filename not in OURS:
            return None
        frame.f_trace_opcodes = True
        return self.instruction

    def instruction(self, _frame, event, _argument):
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.instruction


def test_an_interrupt_at_any_instruction_leaves_every_step_whole_and_once_or_absent(tmp_path):
    nth, seen = 1, set()
    while True:
        folder = tmp_path / str(nth)
        ledger = Ledger(RunWriter(folder))
        try:
            with Interrupt(nth) as interrupt:
                keep_books(ledger)
        except KeyboardInterrupt:
            pass
        if interrupt.left > 0:  # it came through
            break
        ledger.drop_step()
        ledger.flush()
        ledger.flush()  # the second one has nothing to write
        tables = [*folder.glob("stats/*.parquet")]
        steps = []
        if tables:
            ledger._writer.write_meta({"state": "interrupted", "failures": []})
            records = open_run(folder).records
            steps, rows = np.unique(records.step, return_counts=True)
            assert rows.tolist() == [4] * len(steps), f"instruction {nth}"
            assert steps.tolist() == list(range(len(steps))), f"instruction {nth}"
            assert ledger.rows_written == 4 * len(steps)
        assert ledger.steps_written == len(steps)
        seen.add(len(steps))
        nth += 19  # a prime: over four like steps it meets other instructions
    assert seen == set(range(STEPS + 1))
    assert nth > 1000


def test_what_an_interrupt_left_half_written_is_swept_up(tmp_path):
    """Ctrl-C may fall on the first instruction of a context manager's end, which then does nothing."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpdiag.record(model, optimizer, tmp_path / "run"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        mine = tmp_path / "run" / "stats" / f".rank00000-000009.parquet.{os.getpid()}.part"
        another = mine.with_name(f".rank00001-000001.parquet.{os.getpid() + 1}.part")
        mine.write_bytes(b"PAR1")
        another.write_bytes(b"PAR1")  # of a process that is writing it now
    assert not mine.exists()
    assert another.exists()
    assert open_run(tmp_path / "run").meta["failures"] == []
