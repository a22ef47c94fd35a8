"""A small training in a process of its own, recorded or not, for what may happen to a process.

    python trained_child.py RUN STEPS [--uid N] [--limit BYTES --limit-after STEPS]

Prints "recording" once the first step is done, and at the end a digest of the weights. Parts are
written after every step, so that a kill finds the disk busy. A RUN that is "-" is not recorded.
"""

import argparse
import contextlib
import hashlib
import os
import tempfile
import warnings

import torch
from torch import nn

import mpdiag
from mpdiag.recording import ledger


def limit_files(size: int) -> None:
    """No file of this process grows beyond this; writing more is an OSError, as on a full disk."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def compile_counters() -> None:
    """Record a step, for the compiler is read from files that another user may not open."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        model = nn.Linear(32, 8)
        optimizer = torch.optim.Adam(model.parameters())
        with mpdiag.record(model, optimizer, f"{folder}/run", every=1):
            for _ in range(2):
                model(torch.ones(1, 32)).sum().backward()
                optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("steps", type=int)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--limit-after", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ledger._FLUSH_ROWS = 1
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    recorder: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if options.run != "-":
        compile_counters()
    if options.uid is not None:
        os.setuid(options.uid)

    warnings.simplefilter("always")
    if options.run != "-":
        recorder = mpdiag.record(model, optimizer, options.run, every=1)
    with recorder:
        for step in range(options.steps):
            if step == options.limit_after and step:
                limit_files(options.limit)
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            if step == 0:
                print("recording", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
