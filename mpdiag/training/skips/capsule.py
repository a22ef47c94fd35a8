"""Skip capsules: a skipped step in a folder, to be run again on another machine.

::

    capsule/
        capsule.json          step, scale, reason, plan, level, the batch's form, the models' classes
        tensors.safetensors   weights and buffers in FP32, the batch, torch's random state

No pickle: reading one runs no code. Running the step again needs the model's code, and a capsule
only *says* which class it was; the person who replays it names what is imported::

    mpdiag why runs/mine/capsules/step000012 --model package.module:function

where ``function()`` returns the model, and a function of model and batch that returns the loss
(``capsule_replay``).

In a distributed training rank 0 writes the whole weights, and every rank its own batch and random state:
rank 1 into ``step000012-rank00001``. Its document's ``weights`` is the name of rank 0's folder. Where
neither DDP nor FSDP keeps models alike, as in a pipeline's stages, each rank writes its weights, too.
"""

import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpdiag.errors import DamagedCapsule, NewerSchema, UsageError
from mpdiag.files.atomic import atomic_path, write_json
from mpdiag.files.documents import read_document
from mpdiag.files.paths import AnyPath, is_remote, place
from mpdiag.tracing.sharding import reductions
from mpdiag.training.callers import loop_stacklevel
from mpdiag.training.results import StepResult
from mpdiag.training.run_log import RunLog
from mpdiag.training.weights.wrapping import Wrapped

SCHEMA_VERSION = 1
DOCUMENT, TENSORS = "capsule.json", "tensors.safetensors"
_DEPTH = 32


@dataclass(frozen=True)
class Capsule:
    """A skipped step, read back.

    Attributes:
        folder: Where it lies.
        document: ``capsule.json``.
        tensors: By name: ``model.NAME``, ``batch.N``, ``random.NAME``.
    """

    folder: AnyPath
    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def batch(self) -> Any:
        """The step's inputs, nested as they were."""
        return _unpack(self.document["batch"], self.tensors)


def save_capsule(
    folder: str | os.PathLike[str],
    *,
    weights: Mapping[str, Tensor],
    random: Mapping[str, Tensor],
    batch: Any,
    facts: Mapping[str, Any],
) -> AnyPath:
    """Write a skipped step, right after it was skipped: weights and buffers are as before it.

    Args:
        folder: The capsule's folder, which is created.
        weights: The model's state in FP32.
        random: Torch's random state before the step, by generator.
        batch: Its inputs: tensors, numbers, texts, None, in lists, tuples and dicts.
        facts: The rest of ``capsule.json``.

    Raises:
        UsageError: If the batch holds something else.
        OSError: If it cannot be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    form = _pack(batch, tensors)
    tensors |= {f"model.{n}": t for n, t in weights.items()}
    tensors |= {f"random.{n}": t for n, t in random.items()}
    path = place(folder)
    path.mkdir(parents=True, exist_ok=True)
    # Copies: tied weights share memory, which the format refuses.
    plain = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
    with atomic_path(path / TENSORS) as partial:
        save_file(plain, partial)
    document = {"schema_version": SCHEMA_VERSION, "torch": torch.__version__, **facts}
    write_json(path / DOCUMENT, {**document, "batch": form})
    return path


def load_capsule(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule; no code is run.

    Raises:
        DamagedCapsule: If it is missing or cannot be read.
        NewerSchema: If a newer version wrote it.
    """
    from safetensors import SafetensorError

    folder = place(path)
    if folder.name in (DOCUMENT, TENSORS):
        folder = folder.parent
    try:
        document = read_document(folder / DOCUMENT)
        version = document["schema_version"]
        if type(version) is int and version > SCHEMA_VERSION:
            raise NewerSchema(f"{folder} was written by a newer mpdiag: upgrade mpdiag to read it")
        tensors = _read_tensors(folder / TENSORS)
        if "weights" in document:
            beside = _read_tensors(_beside(folder, document["weights"]) / TENSORS)
            tensors |= {n: t for n, t in beside.items() if n.startswith("model.")}
        capsule = Capsule(folder, document, tensors)
        _refuse_incomplete(capsule)
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError),
        *(RecursionError, SafetensorError),
    ) as error:
        detail = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{folder} is not a readable capsule ({detail[0]}): copy it again, both files"
        raise DamagedCapsule(message) from error
    return capsule


def ranks_of(capsule: Capsule) -> list[AnyPath]:
    """The capsules of the other ranks in the same step; none beside a capsule of a further rank."""
    folder = capsule.folder
    if "weights" in capsule.document or is_remote(folder):
        return []
    return sorted(folder.parent.glob(f"{folder.name}-rank*"))


def _beside(folder: AnyPath, name: Any) -> AnyPath:
    """The folder of a name beside a capsule's.

    Raises:
        ValueError: If it is not the name of a folder beside it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"step\d+", name):
        raise ValueError(f"weights is {name!r}, not the name of a capsule")
    return folder.parent / name


def _read_tensors(path: AnyPath) -> dict[str, Tensor]:
    from safetensors.torch import load, load_file

    if not is_remote(path):
        return load_file(path)
    with path.open("rb") as file:
        return load(file.read())


def _refuse_incomplete(capsule: Capsule) -> None:
    """Refuse a capsule that lacks what running its step again asks of it.

    Raises:
        KeyError, TypeError, ValueError: Naming it.
    """
    document = capsule.document
    _ = capsule.batch, float(document["scale"]), int(document["step"])
    _ = document["plan"], document["training"], capsule.tensors["random.cpu"]
    for name in ("reason", "model", "level", "backend"):
        if not isinstance(document[name], str):
            raise TypeError(f"{name} is not text")


_MOST = 3


class CapsuleWriter:
    """Keeps the batches of skipped steps.

    Args:
        log: Into whose folder capsules are written; None where the training has none.
        wrapped: The models.
        facts: What ``capsule.json`` says of the training: level, backend, device and plan.
    """

    def __init__(self, log: RunLog | None, wrapped: Wrapped, facts: Mapping[str, Any]) -> None:
        self._log = log
        self._wrapped = wrapped
        self._facts = facts
        self._written = 0
        self._checked = False

    def check(self, batch: Any) -> None:
        """Refuse a batch that no capsule could hold, before a step is skipped.

        Raises:
            UsageError: If it holds something else than tensors and plain values, or the training
                has no run folder or several models.
        """
        if self._log is None:
            raise UsageError("step(batch=…) writes capsules of skipped steps into a run: pass run=")
        if len(self._wrapped.models) != 1:
            message = "step(batch=…) writes capsules of one model, and this trainer has several"
            raise UsageError(message)
        if not self._checked:  # batches are of one form
            _pack(batch, {})
            self._checked = True

    def write(self, batch: Any, result: StepResult) -> None:
        """Write a capsule of a step that was just skipped; a disk that refuses costs a warning.

        All ranks come here together: the whole of a sharded weight needs each rank's part.
        """
        if self._log is None or self._written == _MOST:
            return
        self._written += 1
        name = f"step{result.step:06d}"
        model = self._wrapped.models[0]
        own = result.rank == 0 or not reductions([model])
        weights = {}
        for key, tensor in self._wrapped.fp32_state(model).items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if own:
                weights[key] = whole.cpu()
        suffix = f"-rank{result.rank:05d}" if result.rank else ""
        folder = self._log.folder / "capsules" / f"{name}{suffix}"
        try:
            save_capsule(
                folder,
                weights=weights,
                random=self._wrapped.start.random,
                batch=batch,
                facts={
                    "step": result.step,
                    "rank": result.rank,
                    "scale": result.scale,
                    "reason": result.reason,
                    "model": f"{type(model).__module__}.{type(model).__qualname__}",
                    "training": model.training,
                    **({} if own else {"weights": name}),
                    **self._facts,
                },
            )
        except OSError as error:
            warnings.warn(
                f"cannot write the capsule {folder} ({error}); training goes on without it",
                RuntimeWarning,
                stacklevel=loop_stacklevel(),
            )


def _pack(value: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """A nest as JSON, its tensors taken out.

    Raises:
        UsageError: Naming what a capsule cannot hold.
    """
    if isinstance(value, Tensor):
        name = f"batch.{sum(n.startswith('batch.') for n in tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}  # JSON has no word for it
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if depth < _DEPTH and isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(v, tensors, depth + 1) for v in value]}
    if depth < _DEPTH and isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {"dict": {k: _pack(v, tensors, depth + 1) for k, v in value.items()}}
    raise UsageError(f"a capsule's batch is tensors and plain values, not {type(value).__name__}")


def _unpack(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "value":
        return value
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in value.items()}
    if kind not in ("list", "tuple"):
        raise ValueError(f"the batch has an unknown part {kind!r}")
    parts = [_unpack(v, tensors) for v in value]
    return parts if kind == "list" else tuple(parts)
