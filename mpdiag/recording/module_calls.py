"""Calls of modules: one pair of torch's global hooks for all recordings of a process.

No module carries a hook of ours: some PyTorch modules choose another algorithm when they do. torch's
compiler traces the hooks with each module that it inlines, and compiles again where their number has
changed. So a script's recording has the pair placed before anything trains; see ``compiled``.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mpdiag.recording import compiled
from mpdiag.tracing.dispatch import is_dynamo_tracing, is_traced
from mpdiag.tracing.uncompiled import compiler_looks_on, hide, unseen, watch_calls


class CallListener(Protocol):
    """Hears of calls that run as they are, not in a graph."""

    def before_forward(self, module: torch.nn.Module, args: Any, *, compiles: bool) -> None:
        """A module is called; ``compiles`` if what it calls is compiled."""

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module has returned, or failed: then ``output`` is None."""


_listeners: list[CallListener] = []
_placed: list[Any] = []
_holders: list[object] = []


def hold() -> Callable[[], None]:
    """Place the hooks, unless they are; returns what ends it, and is called once."""
    if not _holders:
        _placed.extend(watch_calls(_before, _after))
    mine = object()
    _holders.append(mine)

    def release() -> None:
        if mine in _holders:
            _holders.remove(mine)
        while _placed and not _holders:
            _placed.pop().remove()

    return release


def listen(listener: CallListener) -> Callable[[], None]:
    """Let a listener hear of calls from now on; returns what ends it."""
    release = hold()
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        release()

    return end


def _before(module: torch.nn.Module, args: Any) -> None:
    if is_traced():
        if is_dynamo_tracing():
            compiled.enter_graph(module)
    elif compiler_looks_on():
        unseen(_tell_before, module, args, True)
    elif _listeners:
        _tell_before(module, args, False)


def _after(module: torch.nn.Module, args: Any, output: Any) -> None:
    if is_traced():
        if is_dynamo_tracing():
            compiled.leave_graph(module, args, output)
    elif compiler_looks_on():
        unseen(_tell_after, module, args, output)
    elif _listeners:
        _tell_after(module, args, output)


for _hook in (_before, _after):
    hide(_hook)


def _tell_before(module: torch.nn.Module, args: Any, compiles: bool) -> None:
    for listener in tuple(_listeners):
        listener.before_forward(module, args, compiles=compiles)


def _tell_after(module: torch.nn.Module, args: Any, output: Any) -> None:
    for listener in tuple(_listeners):
        listener.after_forward(module, args, output)
