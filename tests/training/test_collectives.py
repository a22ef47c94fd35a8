"""Collectives leave nothing to a process group's threads that needs Python when Python shuts down."""

import threading
import time

import torch

from mpdiag.training import collectives, setup


class Sum:
    """The value of a future: notes in which thread it is read."""

    def __init__(self, total, readers):
        self.total, self.readers = total, readers

    def __getitem__(self, _index):
        self.readers.append(threading.get_ident())
        return self.total


def test_gradients_are_divided_in_the_thread_that_differentiates(monkeypatch):
    """Where another thread does it, that thread may ask for Python's lock while Python shuts down."""
    readers, future, gradients = [], torch.futures.Future(), torch.ones(4)

    def all_reduce(tensor, **_options):
        finish = threading.Timer(0.2, lambda: future.set_result(Sum(2 * tensor, readers)))
        finish.start()
        return type("Work", (), {"get_future": lambda _self: future})()

    monkeypatch.setattr(setup.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(setup.distributed, "get_world_size", lambda _group: 2)
    bucket = type("Bucket", (), {"buffer": lambda _self: gradients})()
    done = setup._reduce((None, torch.float16, False), bucket)
    assert done.done()
    assert readers == [threading.get_ident()]
    assert gradients.tolist() == [1.0] * 4


def holder_of(tensor):
    """Something that holds a tensor without Python, as a thread of the group does."""
    return torch.ones(3, requires_grad=True) * tensor


def test_tensors_are_held_until_the_groups_thread_has_let_them_go():
    tensor = torch.ones(3)
    held = [holder_of(tensor)]
    assert tensor._use_count() > 1
    collectives.keep([tensor])
    collectives.keep([])  # of the next collective: the other owner is still there
    threading.Timer(0.2, held.clear).start()
    began = time.monotonic()
    collectives.let_go()
    assert not held
    assert time.monotonic() - began < collectives._PATIENCE
    assert tensor._use_count() == 1


def test_a_thread_that_lets_nothing_go_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(collectives, "_PATIENCE", 0.01)
    tensor = torch.ones(3)
    holder = holder_of(tensor)
    collectives.keep([tensor])
    collectives.let_go()
    assert not collectives._kept
    assert holder is not None
