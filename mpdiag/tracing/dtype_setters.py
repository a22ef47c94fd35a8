"""Who gave the parameters of a model their dtype, and in which line.

A module's ``to``, ``half``, ``bfloat16`` … cast parameters, and a parameter may be made in half
precision: by ``dtype=``, by torch's default dtype, or by ``from_pretrained`` (a checkpoint's).
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from mpdiag.tracing.precision import HALF
from mpdiag.tracing.source_lines import calling_line

_Note = tuple[torch.dtype, str]
_CASTS = ("to", "type", "half", "bfloat16", "float", "double")


class Replacements:
    """Functions of classes that are replaced for a while.

    Several may replace the same function and end in any order: one that has ended passes calls on until
    those above it have ended, too.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._undo)

    def replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace a function by one that is given it first."""
        before = getattr(owner, name)

        @functools.wraps(before)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if replaced._mpdiag_ended:  # type: ignore[attr-defined]
                return before(*args, **kwargs)
            return call(before, *args, **kwargs)

        replaced._mpdiag_before = before  # type: ignore[attr-defined]
        replaced._mpdiag_ended = False  # type: ignore[attr-defined]
        self._undo.append((owner, name, replaced))
        setattr(owner, name, replaced)

    def restore(self) -> None:
        """Put them back; a second call does nothing."""
        while self._undo:
            owner, name, replaced = self._undo.pop()
            replaced._mpdiag_ended = True
            while getattr(top := getattr(owner, name), "_mpdiag_ended", False):
                setattr(owner, name, top._mpdiag_before)


class DtypeSetters:
    """Notes what gives parameters their dtype, while it is attached.

    Attributes:
        policies: FSDP's policies for half precision that were made, with their lines.
    """

    def __init__(self) -> None:
        # By module and name: FSDP puts another parameter into the same place.
        self._noted: weakref.WeakKeyDictionary[nn.Module, dict[str, _Note]] = (
            weakref.WeakKeyDictionary()
        )
        self._found: dict[int, _Note] | None = None  # by id of the parameters in these places
        self._replaced = Replacements()
        self._handle: Any = None
        self._policies = False  # whether FSDP's are watched
        self.policies: list[str] = []

    def attach(self) -> None:
        """Watch casts of modules, and parameters that are made in half precision."""
        if self._replaced:
            return
        for name in _CASTS:
            self._replaced.replace(nn.Module, name, functools.partial(self._cast, name))
        register = torch_modules.register_module_parameter_registration_hook
        self._handle = register(self._registered)
        self._watch_policies()

    def _watch_policies(self) -> None:
        """Note policies as they are made: one that nothing takes is gone when the training begins."""
        for kind in policy_kinds():
            self._replaced.replace(kind, "__init__", self._policy_made)
            self._policies = True

    def _policy_made(self, plain: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
        plain(policy, *args, **kwargs)
        if policy.param_dtype in HALF:
            words = f"{type(policy).__name__}(param_dtype={policy.param_dtype})"
            self.policies.append(f"{words} at {calling_line()}")

    def detach(self) -> None:
        """Watch no more; what was noted stays."""
        self._replaced.restore()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._policies = False

    def of(self, parameter: nn.Parameter) -> str | None:
        """What gave a parameter the dtype that it has, with its line; None if that was not seen."""
        if self._found is None:
            places = [(m._parameters, notes) for m, notes in self._noted.items()]
            self._found = {id(ps.get(n)): note for ps, notes in places for n, note in notes.items()}
        dtype, words = self._found.get(id(parameter), (None, None))
        return words if dtype == parameter.dtype else None

    def _note(self, module: nn.Module, name: str, dtype: torch.dtype, words: str) -> None:
        self._noted.setdefault(module, {})[name] = dtype, words
        self._found = None

    def _cast(self, name: str, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {(m, n): p.dtype for m, n, p in _places(module)}
        result = plain(module, *args, **kwargs)
        cast = [(m, n, p) for m, n, p in _places(module) if before.get((m, n)) != p.dtype]
        line = calling_line() if cast else ""
        for owner, own, p in cast:
            what = f"{name}({p.dtype})" if name in ("to", "type") else f"{name}()"
            self._note(owner, own, p.dtype, f"{type(module).__name__}.{what} at {line}")
        return result

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if not self._policies:
            self._watch_policies()  # FSDP is imported meanwhile, or not
        if isinstance(parameter, torch.Tensor) and parameter.dtype in HALF:
            made = "from_pretrained" if _inside("from_pretrained") else "made in half precision"
            self._note(module, name, parameter.dtype, f"{made} at {calling_line()}")


def policy_kinds() -> list[type]:
    """The types of FSDP's policies, if FSDP is imported: that takes a second, and is left to others."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    names = ("MixedPrecisionPolicy", "MixedPrecision")
    return [vars(loaded)[n] for n in names if n in vars(loaded)] if loaded else []


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Where the parameters of a module are: the module that holds each, and its name there."""
    for inside in module.modules():
        yield from ((inside, n, p) for n, p in inside._parameters.items() if p is not None)


def _inside(function: str) -> bool:
    """Whether a function of this name is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
