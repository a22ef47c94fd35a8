"""Forks a child with torch already imported for each line of JSON on stdin; prints its exit code."""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import torch._dynamo  # noqa: F401 - slow to import: the reason for this process

import mpdiag.cli
import mpdiag.launching.recorded_script
import mpdiag.launching.trained_script
import mpdiag.recording.recorder
import mpdiag.training.script_trainer

with suppress(ImportError):
    import lightning  # noqa: F401
with suppress(ImportError):
    from transformers import BertForSequenceClassification, Trainer  # noqa: F401


def child(job) -> None:
    os.chdir(job["cwd"])
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    words = job["words"]
    if job["program"] == "mpdiag":
        sys.argv = ["mpdiag", *words]
        mpdiag.cli.main()
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                child(job)
            except SystemExit as error:
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
                code = 1 if isinstance(error.code, str) else int(error.code or 0)
            except BaseException:  # noqa: BLE001 - as Python would show it
                sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
