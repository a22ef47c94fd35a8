"""A process with torch imported, of which a rehearsal's parts are copies: each saves the import.

    python -m gpu_sections.forks SOCKET

A rehearsal measures nothing, and on a slow CPU most of a part's time would be imports. On a GPU no
process is copied: every part starts anew, so that none inherits anything.

An order comes through the socket as one line of JSON: what to run, and how. The answer is the new
process's id, and its exit code once it has ended, a line each. The process ends with its standard
input, which is the command's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sections.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOCKET = "MPDIAG_GPU_FORKS"
"""The environment's name for the path of the socket, by which a part's own programs find it."""
PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "torch.utils.flop_counter"),
    *("pandas", "pyarrow.parquet", "torch.utils.tensorboard", "mpdiag.cli", "mpdiag.workloads"),
    *("mpdiag.recording.recorder", "mpdiag.training.trainer", "mpdiag.recording.counting.device"),
    *("mpdiag.demo.workflow", "mpdiag.tensorcores.profiled_script", "pyarrow.pandas_compat"),
)
BEGINS = 120.0
"""Seconds that the imports may take."""


class Fork:
    """A process under way.

    Attributes:
        pid: Its id.
    """

    def __init__(self, path: str, order: Mapping[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(BEGINS)
        self._socket.connect(path)
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        self._code: int | None = None
        self.pid = int(self._line())

    def wait(self, seconds: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            TimeoutError: If it has not ended in time.
        """
        if self._code is None:
            self._socket.settimeout(seconds)
            self._code = int(self._line() or -signal.SIGKILL)
            self._socket.close()
        return self._code

    def _line(self) -> str:
        """What is said next; nothing if nobody is there to say it."""
        said = b""
        while not said.endswith(b"\n") and (byte := self._socket.recv(1)):
            said += byte
        return said.decode()


@contextmanager
def serving(environment: Mapping[str, str]) -> Iterator[str | None]:
    """A process that forks, while the context lasts; yields the path of its socket.

    None where it does not start: then each part starts anew, and says what is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="mpdiag-") as folder:  # a socket's path has to be short
        path = Path(folder) / "forks"
        words = [sys.executable, "-m", "gpu_sections.forks", str(path)]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "env": environment, "cwd": folder}
        with subprocess.Popen(words, **options) as server:
            began = time.monotonic()
            while not path.exists() and server.poll() is None:
                if time.monotonic() - began > BEGINS:
                    server.kill()
                time.sleep(0.05)
            try:
                yield str(path) if server.poll() is None else None
            finally:
                server.kill()


# -- in that process -------------------------------------------------------------------------------


def preload() -> None:
    """Import what parts import; what is not there is theirs to miss."""
    for name in (*PRELOADED, *(f"gpu_sections.{part.module}" for part in PARTS)):
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        _load_kernels()
    gc.freeze()  # a recording looks through all objects for scalers: not through these


def _load_kernels() -> None:
    """Load what Numba has compiled. Nothing here is large enough to start a thread."""
    import torch

    from mpdiag.recording.counting.host import HostRows

    rows, values = HostRows(), torch.arange(-8.0, 8.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rows.count(values.to(dtype))
    rows.count_many_updates([(values, values * 2)])
    rows.read().merged([[0]])


def fork(order: Mapping[str, Any]) -> int:
    """Start a process; returns its id."""
    pid = os.fork()
    if pid:
        with suppress(OSError):  # whoever is first: then nobody finds the process without its group
            os.setpgid(pid, order["group"])
        return pid
    code = 1
    try:
        os.setpgid(0, order["group"])
        for name in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_DFL)
        _take_on(order)
        code = _call(order["words"])
    except BaseException:  # noqa: BLE001 - as Python would show it
        traceback.print_exc()
    finally:
        with suppress(ValueError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_on(order: Mapping[str, Any]) -> None:
    """Streams, folder and environment as a process of its own would have them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])


def _call(words: list[str]) -> int:
    """``gpu_sections.child`` or ``mpdiag``, as ``python -m`` would run it."""
    module, *rest = words
    code = 0
    try:
        if module == "mpdiag":
            sys.argv = ["mpdiag", *rest]
            importlib.import_module("mpdiag.cli").main()
        else:
            code = importlib.import_module(module).main(rest)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = 1 if isinstance(error.code, str) else int(error.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def main(path: str) -> None:
    """Take orders until the command has gone."""
    preload()
    children: dict[int, socket.socket] = {}
    selector, (ended, woken) = selectors.DefaultSelector(), socket.socketpair()
    for end in (ended, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)  # noqa: PTH104 - now it listens
        for one in (listener, ended, sys.stdin):
            selector.register(one, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is ended:
                    ended.recv(4096)
                    _report(children)
                    continue
                line, _ = listener.accept()
                with line.makefile("r", encoding="utf-8") as order:
                    pid = fork(json.loads(order.readline()))
                children[pid] = line
                line.sendall(f"{pid}\n".encode())


def _report(children: dict[int, socket.socket]) -> None:
    """Tell those who wait what has ended."""
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with suppress(OSError), children.pop(pid) as line:
                line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
