"""The command line of ``benchmarks/gpu.py``: what to run, in which order, and what is written.

This process never imports torch: an error of CUDA, which later calls would inherit, stays in a child.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sections import document, files, forks, markdown, page, parts, runner
from gpu_sections.promises import of_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FACTS_SECONDS = 120
REHEARSED = 4
"""How many times longer a part may take in a rehearsal: the machine may be busy and slow."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="benchmarks/gpu.py",
        description="Settle on a GPU what only a GPU can settle. See the top of this file.",
    )
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--quick", action="store_true", help="within 2 minutes")
    found.add_argument(
        "--only", action="append", metavar="SECTION", help="a letter or a part; may be repeated"
    )
    found.add_argument("--resume", action="store_true", help="run what an earlier pass left")
    found.add_argument("--minutes", type=float, help="of the whole pass; the parts' limits follow")
    found.add_argument("--out", type=Path, help="where results are written")
    found.add_argument("--docs", action="store_true", help="renew docs/gpu.md, run nothing")
    found.add_argument("--list", action="store_true", help="list parts and promises, run nothing")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run a pass."""
    options = parser().parse_args(words)
    try:
        wanted = parts.chosen(options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.docs:
        page.renew()
        return 0
    if options.list:
        _list(wanted)
        return 0
    if not runner.has("torch"):
        print(
            f"PyTorch is not installed for {sys.executable}: run benchmarks/gpu.py with a Python "
            "that has it",
            file=sys.stderr,
        )
        return 3
    if options.out is None:  # what is committed is renewed on purpose alone
        options.out = page.REHEARSALS if options.device == "cpu" else page.RESULTS
    facts = machine(options.device)
    if "problem" in facts:
        print(facts["problem"], file=sys.stderr)
        return 3
    return Pass(options, facts).run(wanted)


def _list(wanted: Sequence[parts.Part]) -> None:
    for part in wanted:
        print(f"{part.key}: at most {part.seconds:.0f} s, quick {part.quick:.0f} s")
        for promise in of_part(part.key):
            print(f"    {promise.id}: {promise.sentence}")


def machine(device: str) -> dict[str, Any]:
    """Date, device and versions, found by a child; or the ``problem``."""
    code = f"from gpu_sections.facts import show; show({device!r})"
    with tempfile.TemporaryDirectory(prefix="mpdiag-gpu-") as cache:
        try:
            child = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=False,
                timeout=FACTS_SECONDS,
                env=runner.environment(None, Path(cache), device),
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"PyTorch did not answer within {FACTS_SECONDS} s"}
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"problem": f"PyTorch cannot be used here: {last}"}
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found | {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}


class Pass:
    """One pass: its document, its clock and its files.

    Args:
        options: As typed.
        facts: Date, device and versions.
    """

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.options = options
        rehearsal = options.device == "cpu"
        self.mode = "rehearsal" if rehearsal else "quick" if options.quick else "full"
        base = parts.QUICK_SECONDS if options.quick else parts.FULL_SECONDS
        self.seconds = 60 * options.minutes if options.minutes else base
        self.stretch = max(1.0, self.seconds / base)
        name = "rehearsal" if rehearsal else slug(facts["device"]["name"])
        ending = "-quick" if self.mode == "quick" else ""  # it must not replace a full pass
        self.path = options.out / f"gpu-{name}{ending}.json"
        missing = runner.missing(parts.PARTS)
        stored = document.load(self.path)
        goes_on = stored is not None and document.same_pass(stored, self.mode, facts)
        if stored is not None and goes_on and (options.resume or options.only):
            self.document = stored | facts | {"missing": missing}
        else:
            self.document = document.new(self.mode, facts, missing)

    def run(self, wanted: Sequence[parts.Part]) -> int:
        """Run the parts, and write the document after each of them.

        On a GPU they run one after another; in a rehearsal, which measures nothing, two at a time.
        """
        for package, keys in self.document["missing"].items():
            print(f"missing: {package}, which {', '.join(keys)} would use", flush=True)
        with (
            _ending_as_by_ctrl_c(),
            tempfile.TemporaryDirectory(prefix="mpdiag-gpu-", ignore_cleanup_errors=True) as name,
        ):
            keep = Path(name) / "keep"
            keep.mkdir()
            stopped = False
            try:
                said = runner.warm(self.options.device, keep.parent / "cache")
                print(f"compiled before the first section: {said}", flush=True)
                self._ends = time.monotonic() + self.seconds
                for part, ended, lines in self._results(self._due(wanted), keep):
                    self._enter(part, ended, lines)
                    self._save(keep)
                    if ended["state"] == runner.STOPPED:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                stopped = True
                print("stopped; go on with --resume", file=sys.stderr)
            self._save(keep)
        print(f"\n{self.path}\n{self.path.with_suffix('.md')}")
        found = document.counts(self.document)
        print(", ".join(f"{count} {state}" for state, count in found.items()))
        return int(stopped) or document.verdict(self.document)

    def _results(self, due: Sequence[parts.Part], keep: Path) -> Iterator[tuple[Any, ...]]:
        """Each part with how it ended and what it reported, as it ends."""
        if self.mode != "rehearsal":
            for part in due:
                yield self._run(part, keep)
            return
        made = runner.environment(None, keep.parent / "cache", self.options.device)
        with forks.serving(made) as server, ThreadPoolExecutor(2) as pool:
            # The last first, for they take the longest.
            waiting = [pool.submit(self._run, part, keep, server) for part in reversed(due)]
            try:
                for done in as_completed(waiting):
                    yield done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _due(self, wanted: Sequence[parts.Part]) -> list[parts.Part]:
        """The parts to run now."""
        if not self.options.resume:
            return list(wanted)
        earlier = [part for part in wanted if document.done(self.document, part.key)]
        for part in earlier:
            print(f"{part.key}: finished in an earlier pass", flush=True)
        return [part for part in wanted if part not in earlier]

    def _run(
        self, part: parts.Part, keep: Path, server: str | None = None
    ) -> tuple[parts.Part, dict[str, Any], list[Any]]:
        """Run one part within its limit and the time that is left; see ``runner.run``."""
        slower = REHEARSED if self.mode == "rehearsal" else 1
        limit = slower * self.stretch * (part.quick if self.options.quick else part.seconds)
        left = self._ends - time.monotonic()
        ended = {"state": "not run", "seconds": 0.0, "limit": limit}
        if limit == 0:
            reason = "is not part of a quick pass"
            return part, ended | {"state": document.LEFT_OUT, "reason": reason}, []
        if left < parts.LEAST_SECONDS:
            return part, ended | {"reason": "did not fit into the time of the pass"}, []
        return part, *runner.run(
            part,
            device=self.options.device,
            quick=self.options.quick,
            seconds=min(limit, left),
            keep=keep,
            cache=keep.parent / "cache",
            server=server,
        )

    def _enter(self, part: parts.Part, ended: dict[str, Any], lines: list[Any]) -> None:
        """Enter a part's results, and print them."""
        document.enter(self.document, part.key, ended, lines)
        said = ended.get("reason", "finished")
        print(f"{part.key} {said} ({ended['seconds']:.1f} s)", flush=True)
        for promise in of_part(part.key):
            entry = self.document["promises"][promise.id]
            state = entry["rehearsal"] if self.mode == "rehearsal" else entry["state"]
            text = entry["figure"] or entry["reason"]
            print(f"    {state:12} {promise.id:24} {text}", flush=True)

    def _save(self, keep: Path) -> None:
        stem = self.path.with_suffix("")
        self.document["files"] = files.publish(keep, stem)
        document.save(self.path, self.document)
        document.write(self.path.with_suffix(".md"), markdown.report(self.document))


@contextmanager
def _ending_as_by_ctrl_c() -> Iterator[None]:
    """A polite end from outside (``timeout``, a scheduler) keeps what Ctrl-C keeps."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def slug(name: str) -> str:
    """A device's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"
