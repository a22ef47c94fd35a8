"""Forks children with torch already imported; see ``script_processes.py``, which starts it.

    python fork_server.py [MODULE …]

Each line on stdin is an order in JSON. ``{"start": jobs}`` is answered with the process of each job,
``{"look": processes}`` with what each has printed since and, once it has ended, its exit code. MODULEs
that are installed are imported as well, for scripts that need them.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pyarrow.compute
import pyarrow.parquet  # noqa: F401
import rich.console  # noqa: F401
import torch._dynamo  # slow to import: the reason for this process
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import mpdiag.analysis.analyzer
import mpdiag.cli
import mpdiag.launching.recorded_script
import mpdiag.launching.trained_script
import mpdiag.recording.recorder
import mpdiag.reports.terminal
import mpdiag.training.script_trainer


def run_python(words: list[str]) -> None:
    """As the interpreter would: a script, ``-m MODULE`` or ``-c CODE``."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def child(job: dict) -> None:
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    sys.path[1:1] = filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))
    if job["program"] == "mpdiag":
        sys.argv = ["mpdiag", *job["words"]]
        mpdiag.cli.main()
    else:
        run_python(job["words"])


def exit_code(job: dict) -> int:
    """Run a job, and then what an interpreter runs at its end."""
    code = 0
    try:
        child(job)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = 1 if isinstance(error.code, str) else int(error.code or 0)
    except BaseException as error:  # noqa: BLE001 - as Python would show it
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return code


@dataclass(frozen=True)
class Child:
    pid: int
    pipes: tuple[int, int]

    def look(self) -> tuple[int | None, str, str]:
        """The exit code, once there is one, and what was printed since the last look."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        out, err = (printed(pipe) for pipe in self.pipes)
        if not done:
            return None, out, err
        for pipe in self.pipes:
            os.close(pipe)
        return os.waitstatus_to_exitcode(status), out, err


def printed(pipe: int) -> str:
    said = bytearray()
    with suppress(BlockingIOError):
        while piece := os.read(pipe, 1 << 16):
            said += piece
    return said.decode(errors="replace")


def start(job: dict) -> Child:
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        for pipe in (write_out, write_err):
            os.close(pipe)
        for pipe in (out, err):
            os.set_blocking(pipe, False)
        return Child(pid, (out, err))
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where it was ignored
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write_out, 1)
        os.dup2(write_err, 2)
        code = exit_code(job)
    finally:
        with suppress(ValueError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:  # as the interpreter does, so that a shell sees the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def main() -> None:
    for name in sys.argv[1:]:
        with suppress(ImportError):
            import_module(name)
    sys.argv[1:] = []
    gc.collect()
    gc.freeze()  # a child shares these objects, and looks through none of them
    children: dict[int, Child] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            started = [start(job) for job in order["start"]]
            children |= {child.pid: child for child in started}
            reply: list[object] = [child.pid for child in started]
        else:
            reply = [children[pid].look() for pid in order["look"]]
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
