"""Run a Python script as ``python script.py ARGS`` would, in this process.

The script gets a ``__main__`` module of its own, which stays in ``sys.modules`` after it has ended
(``runpy`` removes its module): functions registered with ``atexit``, pickled or passed to worker
processes can still be found there. ``sys.argv``, ``sys.path[0]``, the working folder, the exit code
and the traceback are the same as without mpdiag.
"""

import builtins
import importlib.util
import os
import re
import runpy
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from mpdiag.errors import InputError, MpdiagError, UsageError

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?w?(\.exe)?", re.IGNORECASE)
_OURS = str(Path(__file__).resolve().parent.parent)
INTERRUPTED = 130
"""The exit code that a shell reports for a program ended by Ctrl-C."""


@dataclass(frozen=True)
class Script:
    """A script to run.

    Attributes:
        target: A script, a folder or archive with a ``__main__.py``, or a module's name.
        module: Whether ``target`` is a module's name (``python -m``).
        arguments: The script's ``sys.argv[1:]``.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """A short name for runs."""
        if self.module:
            return self.target.removesuffix(".__main__").rpartition(".")[2]
        path = Path(self.target).resolve()
        return path.parent.name if path.name == "__main__.py" else path.stem

    @property
    def words(self) -> tuple[str, ...]:
        """The words that one would type after ``python``."""
        return (*(("-m",) if self.module else ()), self.target, *self.arguments)


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes:
        code: Its exit code.
        state: ``complete``, ``failed`` or ``interrupted``.
    """

    code: int
    state: str


def parse(words: Sequence[str]) -> Script:
    """Read the words after ``--``: ``script.py ARGS`` or ``-m package ARGS``, maybe after ``python``.

    Raises:
        UsageError: If there is nothing to run.
        InputError: If the script does not exist.
    """
    rest = list(words)
    if rest and _PYTHON.fullmatch(Path(rest[0]).name):
        rest = rest[1:]
        while rest and rest[0] in ("-u", "-B", "-E", "-s"):  # these change nothing for the script
            rest = rest[1:]
    if not rest:
        raise UsageError("there is no script to run: write `-- script.py ARGS` at the end")
    if rest[0] == "-m":
        if len(rest) == 1:
            raise UsageError("-m needs the name of a module: write `-- -m package ARGS`")
        return Script(rest[1], True, tuple(rest[2:]))
    if rest[0].startswith("-"):
        message = f"cannot run Python with {rest[0]}: give the script itself, or -m and a module"
        raise UsageError(message)
    return Script(_located(rest[0]), False, tuple(rest[1:]))


def _located(word: str) -> str:
    """A script's path; if there is no such file, the Python script that a command of that name is."""
    if Path(word).exists():
        return word
    command = shutil.which(word)
    if command is not None:
        with Path(command).open("rb") as file:
            if re.match(rb"#!.*python", file.readline()):
                return command
        raise InputError(f"{word} is not a Python script: give the training script itself")
    raise InputError(f"there is no script {word}: give its path, or -m and a module's name")


def call_in(script: Script, name: str) -> Any:
    """Call a script's function; its part under ``if __name__ == "__main__"`` does not run.

    Raises:
        UsageError: If it defines no such function.
        SystemExit: With 1, after the script's exception was shown.
    """
    sys.argv = [script.target, *script.arguments]
    _put_first("" if script.module else str(Path(script.target).resolve().parent))
    start = runpy.run_module if script.module else runpy.run_path
    try:
        names = start(script.target, run_name="mpdiag_script")
        if name in names:
            return names[name]()
    except Exception as error:  # noqa: BLE001 - every exception is the script's
        _show(error)
        raise SystemExit(1) from None
    raise UsageError(f"{script.target} defines no {name}(): write it outside of any function")


def run(script: Script) -> Ending:
    """Run a script to its end, including its threads.

    Its exceptions are shown as Python would show them; our own (``MpdiagError``) are raised again.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    former = sys.modules["__main__"]
    _kept.append(former)  # its functions may still be called: Python must not clear it
    sys.modules["__main__"] = main
    sys.argv = [script.target, *script.arguments]
    try:
        code = _prepare(script, main)
        exec(code, main.__dict__)  # noqa: S102 - running the script is the task
        _wait_for_threads()
    except SystemExit as error:
        return _exited(error)
    except MpdiagError as error:
        if not _is_ours(error):
            _show(error)
            return Ending(1, "failed")
        raise
    except KeyboardInterrupt as error:
        _show(error)
        return Ending(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001 - every exception is the script's
        _show(error)
        return Ending(1, "failed")
    return Ending(0, "complete")


_kept: list[ModuleType] = []


def _prepare(script: Script, main: ModuleType) -> CodeType:
    """Set up the new ``__main__`` and return its code."""
    if script.module:
        _put_first("")
        name = script.target
        spec = _found(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _found(f"{name}.__main__")
        if spec is None or spec.loader is None:
            raise InputError(f"there is no module {name} to run: see `python -m {name}`")
        sys.argv[0] = str(spec.origin)
        main.__spec__ = spec
        main.__package__ = spec.parent
    else:
        path = Path(script.target)
        if path.is_dir() or path.suffix in (".zip", ".pyz"):
            _put_first(str(path.resolve()))
            spec = PathFinder.find_spec("__main__", [str(path.resolve())])
            if spec is None:
                raise InputError(f"there is no __main__.py in {path}: give a script")
            main.__spec__ = spec
            main.__package__ = ""
        else:
            _put_first(str(path.resolve().parent))
            whole = os.path.join(Path.cwd(), script.target)  # noqa: PTH118 - keeps a ``./``
            main.__file__ = whole
            main.__loader__ = SourceFileLoader("__main__", whole)
            return compile(path.read_bytes(), whole, "exec", dont_inherit=True)
    main.__loader__ = spec.loader
    main.__file__ = spec.origin
    code: CodeType | None = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if code is None:
        raise InputError(f"{script.target} has no code to run: see `python -m {script.target}`")
    return code


def _found(name: str) -> ModuleSpec | None:
    """A module's spec; None if the module, or the package around it, does not exist."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # the package itself imports something that does not exist


def _put_first(folder: str) -> None:
    """Set ``sys.path[0]`` as Python does; until now it is the folder of ``mpdiag``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder or str(Path.cwd())


def _wait_for_threads() -> None:
    """Wait for non-daemon threads, as Python does at exit: some scripts train in one.

    A pool keeps its threads until Python shuts down, which comes later: they are waited for while
    they have something to do. Torch's compiler leaves one behind.
    """
    quiet = 0
    while quiet < _QUIET:
        threads = [t for t in threading.enumerate() if not t.daemon]
        threads.remove(threading.main_thread())
        if not threads:
            return
        busy = [t for t in threads if not _is_kept_by_a_pool(t)]
        quiet = 0 if busy else quiet + 1
        (busy or threads)[0].join(0.02)


_QUIET = 2
"""Looks in which no thread is busy: between a pool's queue and its function, one looks idle."""


def _is_kept_by_a_pool(thread: threading.Thread) -> bool:
    """Whether a thread waits for work of a pool of threads, or manages a pool of processes."""
    pools, processes = map(sys.modules.get, _POOLS)
    if thread in getattr(processes, "_threads_wakeups", {}):
        return True
    work = getattr(pools, "_threads_queues", {}).get(thread)
    frame = sys._current_frames().get(thread.ident or 0)
    waits = frame is not None and frame.f_code.co_name == "_worker"
    return work is not None and work.empty() and waits


_POOLS = ("concurrent.futures.thread", "concurrent.futures.process")


def _exited(error: SystemExit) -> Ending:
    code: Any = error.code
    if code is None or isinstance(code, int):
        return Ending(code or 0, "failed" if code else "complete")
    print(code, file=sys.stderr)
    return Ending(1, "failed")


def _is_ours(error: BaseException) -> bool:
    """Whether the command raised it, rather than a script that uses mpdiag itself."""
    return bool(getattr(error, "of_launching", False)) or isinstance(error, InputError)


def _show(error: BaseException) -> None:
    """Show the script's traceback through its own ``sys.excepthook``, without our frames."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _without_ours(link.__traceback__)
        link = link.__cause__ or link.__context__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - a script's hook may fail
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            entries.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        # An instruction may have no line (an interrupt can hit one), but TracebackType needs a number.
        line = entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
    return kept


class AfterTorch:
    """Calls a function as soon as the script has imported torch; at once if it is imported already.

    We must not import torch ourselves: what a script sets before (threads, visible devices) is read
    at its import.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._looking = False

    def install(self) -> None:
        """Wait for the import of torch."""
        if "torch" in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Find torch as usual, and add our call after its import; Python's protocol of finders."""
        if name != "torch" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._call()

        loader.exec_module = exec_module
        return spec
