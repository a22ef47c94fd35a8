"""Several processes: ranks that a launcher starts, and processes that a script starts itself."""

import contextlib
import functools
import gc
import hashlib
import multiprocessing.process
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mpdiag.errors import ExitCode, RunExists
from mpdiag.files.paths import AnyPath, is_remote
from mpdiag.runs.provenance import announced_ranks
from mpdiag.runs.run import META, free_name


def tell(sentence: str) -> None:
    """Write a sentence for the person at the terminal; a stderr that takes none ends no training."""
    with contextlib.suppress(OSError):
        print(f"mpdiag: {sentence}", file=sys.stderr, flush=True)


def stderr_file() -> int:
    """The file descriptor of what is said, for a child's output."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by something without one: a notebook
        return 2


def claim_run(parent: Path, name: str) -> Path:
    """A free run folder of this name, made at once; all ranks of one launch get the same.

    The first rank writes its choice into a small file, named after the launch, which the others
    read.
    """
    if announced_ranks()[1] == 1:
        return _make_free(parent, name)
    launch = "|".join(
        str(part)
        for part in (
            *(os.environ.get(k, "") for k in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
            os.getppid(),
        )
    )
    digest = hashlib.sha256(launch.encode()).hexdigest()[:12]
    parent.mkdir(parents=True, exist_ok=True)
    claim = parent / f".{name}.{digest}.claim"
    try:
        with claim.open("x") as file:
            chosen = _make_free(parent, name)
            file.write(chosen.name)
        return chosen
    except FileExistsError:
        for _ in range(100):
            if text := claim.read_text():
                if Path(text).name != text:  # our claims name a folder beside them
                    break
                return parent / text
            time.sleep(0.02)
    return _make_free(parent, name)


def _make_free(parent: Path, name: str) -> Path:
    """The first free folder of this name; commands that look at the same time get one each."""
    while True:
        chosen = free_name(parent, name)
        try:
            chosen.mkdir(parents=True)
        except FileExistsError:
            if chosen.exists():
                continue
        except OSError:  # said when something is written there
            pass
        return chosen


def drop_unused(folder: AnyPath) -> None:
    """Remove a folder of ``claim_run`` in which nothing was written, and an empty one around it."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


def release_claims(folder: AnyPath) -> None:
    """Remove the small files of ``claim_run``; rank 0 calls this when it ends."""
    if is_remote(folder):  # never claimed: ``--out`` named it
        return
    for claim in folder.parent.glob(".*.claim"):
        with contextlib.suppress(OSError):
            if claim.read_text() == folder.name:
                claim.unlink()


_START = """import sys
sys.path[0] = {!r}
from runpy import run_module
run_module({!r}, None, "__main__")"""


def own_process(module: str, *words: str) -> list[str]:
    """The command that runs a module of ours in a process of its own.

    ``python -m`` would look for packages in the present folder first, and take a user's ``click.py``
    for one of them. This process looks where the present one does.
    """
    return [sys.executable, "-c", _START.format(sys.path[0], module), *words]


LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def launcher_of(words: Sequence[str]) -> list[str] | None:
    """The arguments of torchrun if the words run it, else None."""
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python"):
        rest = rest[1:]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in LAUNCHERS:
        return rest[2:]
    if rest and Path(rest[0]).name == "torchrun":
        return rest[1:]
    return None


def launched_name(arguments: Sequence[str]) -> str:
    """A run's name from torchrun's arguments: the first word that is a script."""
    scripts = (Path(word).stem for word in arguments if word.endswith(".py"))
    return next(scripts, "torchrun")


def through_launcher(arguments: Sequence[str], command: Sequence[str]) -> list[str]:
    """Arguments for torchrun that run our command around the script in each process.

    Args:
        arguments: Those of the original call: ``--nproc-per-node 2 train.py --epochs 3``.
        command: Our command: ``record --out runs/train``.
    """
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(list(arguments))
    count = len(parsed.training_script_args) + 1
    options = [w for w in arguments[: len(arguments) - count] if w not in ("-m", "--module")]
    script = [*(("-m",) if parsed.module else ()), *arguments[len(arguments) - count :]]
    return [*options, "--module", "mpdiag", *command, "--", *script]


def launch(launcher: Sequence[str], out: Path | None, name: str, command: Sequence[str]) -> int:
    """Run torchrun in this process, and our command around the script in each of its processes.

    Args:
        launcher: See ``launcher_of``.
        out: The run folder; None for a free one of this name, which goes if nothing is written there.
        name: The run's name.
        command: Our command and its options, but for ``--out``.

    Returns:
        The exit code.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    folder = out or claim_run(Path("runs"), name)
    try:
        main(through_launcher(launcher, [*command, "--out", str(folder)]))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((c if c > 0 else 128 - c for c in codes if c), 1)
    finally:
        if out is None:
            drop_unused(folder)
    return 0


_CHILDREN = 10_000
"""Folders of one name to try."""
_GROUPS_RUN = "mpdiag/run"
_NAMING = timedelta(seconds=10)
"""How long to wait for the group's first process to name their run: it has one small file to write."""


def new_launch() -> str:
    """What tells the claims of this command's processes from those of another command."""
    return f"{os.getpid()}-{time.time_ns()}"


def claim_childs_run(folder: AnyPath, launch: str) -> AnyPath:
    """The run folder of a process that the recorded script has started.

    The ranks of one process group share a run, whichever of them begins first. Any other process has
    the first of ``folder``, ``folder-2`` … that is neither a run nor another process's.

    Args:
        folder: The run folder of the whole command.
        launch: Of the whole command: ``new_launch``.

    Raises:
        RunExists: If all of these folders are taken.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _claim_free(folder, launch)
    from torch.distributed.distributed_c10d import _get_default_store

    store, me = _get_default_store(), str(dist.get_rank())
    if store.compare_set(f"{_GROUPS_RUN}/named by", "", me).decode() == me:
        mine = _claim_free(folder, launch)
        store.set(_GROUPS_RUN, mine.name)
        return mine
    store.wait([_GROUPS_RUN], _NAMING)
    return folder.parent / store.get(_GROUPS_RUN).decode()


def release_childrens(folder: AnyPath, launch: str) -> None:
    """Remove the small files of ``claim_childs_run``."""
    if not is_remote(folder):
        for claim in folder.parent.glob(f".*.{launch}.claim"):
            claim.unlink(missing_ok=True)


def _claim_free(folder: AnyPath, launch: str) -> AnyPath:
    names = (folder.name, *(f"{folder.name}-{number}" for number in range(2, _CHILDREN)))
    for candidate in (folder.parent / name for name in names):
        taken = (candidate / META).exists() or (candidate != folder and candidate.exists())
        if not taken and (is_remote(candidate) or _claimed(candidate, launch)):
            return candidate
    raise RunExists(f"{folder} and {_CHILDREN - 2} more folders of that name are taken")


def _claimed(candidate: Path, launch: str) -> bool:
    """Whether this process is the first to claim a folder; of two at the same time, one is."""
    candidate.parent.mkdir(parents=True, exist_ok=True)
    try:
        (candidate.parent / f".{candidate.name}.{launch}.claim").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def refuse_existing(folder: AnyPath, rank: int) -> None:
    """Refuse to write a rank's run into a folder that holds one."""
    mine = folder / META if rank == 0 else folder / "ranks" / f"rank{rank:05d}.json"
    if mine.exists():
        message = f"{folder} already holds a run: choose another folder with --out, or remove it"
        raise RunExists(message)


_NOT_THE_SCRIPTS = frozenset("torch multiprocessing concurrent joblib mpdiag".split())
_watching: list[tuple[int, weakref.WeakMethod[Callable[[], None]]]] = []


def abandon_in_children(abandon: Callable[[], None]) -> None:
    """Register a method that forked children call first, to drop the hooks they inherited.

    Its object is not kept alive: it holds the script's models, which must not outlive the script.
    """
    _watching.append((os.getpid(), weakref.WeakMethod(abandon)))


def free_cycles() -> None:
    """Free what only references of ours to each other keep: the script's models, when it has ended.

    What is not freed before Python shuts down may take a process group's threads along, which hangs.
    """
    gc.collect()


class Refusal(BaseException):
    """A script cannot be trained safely; its own ``except Exception`` cannot catch this."""


class _WatchedTarget:
    """A process's target with our watch around it; spawned processes get it by pickle."""

    def __init__(self, target: Any, watch: Callable[[Any], Any], settings: Any) -> None:
        self.target = target
        self.watch = watch
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for process, method in _watching:
            if process != os.getpid() and (abandon := method()) is not None:
                abandon()
        _watching.clear()
        finish = self.watch(self.settings)
        state = "failed"
        try:
            result = self.target(*args, **kwargs)
            state = "complete"
            return result
        except Refusal as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(ExitCode.INPUT)
        except SystemExit as error:
            state = "failed" if error.code else "complete"
            raise
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            finish(state)


def follow_children(watch: Callable[[Any], Any], settings: Any) -> None:
    """Watch the processes that the script starts with ``multiprocessing``, except data loaders.

    Args:
        watch: Called in the child with the settings; returns a function of the final state.
        settings: Passed to ``watch``; pickled for spawned children.
    """
    base = multiprocessing.process.BaseProcess
    make = base.__init__

    @functools.wraps(make)
    def made(self: Any, group: Any = None, target: Any = None, *args: Any, **kwargs: Any) -> None:
        if target is not None and _may_train(target):
            target = _WatchedTarget(target, watch, settings)
        make(self, group, target, *args, **kwargs)

    base.__init__ = made  # type: ignore[method-assign]


def _may_train(target: Any) -> bool:
    """Whether a target is the script's own function, or torch's spawn around one."""
    module = str(getattr(target, "__module__", "") or "")
    if module == "torch.multiprocessing.spawn":
        return True
    return module.partition(".")[0] not in _NOT_THE_SCRIPTS
