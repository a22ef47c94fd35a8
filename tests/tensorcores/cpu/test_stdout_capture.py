"""oneDNN's lines are taken out of standard output, and its introduction leads each capture."""

from __future__ import annotations

import os

import pytest

from mpdiag.tensorcores.cpu import onednn
from mpdiag.tensorcores.cpu.onednn import StdoutCapture, read_log

INTRODUCTION = (
    "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)\n"
    "onednn_verbose,v1,info,cpu,isa:Intel AVX 10.1\n"
)
EXECUTED = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,"
    "src:bf16::blocked:ab::f0 wei:bf16::blocked:ab::f0 dst:bf16::blocked:ab::f0,,,8x16:16x4,0.21\n"
)


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(onednn, "_introduction", [])


def captured(text: str) -> list[str]:
    capture = StdoutCapture()
    capture.open()
    os.write(1, text.encode())
    return capture.close()


def test_what_onednn_says_once_leads_each_capture(capfd):
    first = read_log(captured(INTRODUCTION + "mine\n" + EXECUTED))
    second = read_log(captured("and mine\n" + EXECUTED + EXECUTED))
    assert (first.version, first.isa) == ("v3.12.0 (commit 80afa71)", "Intel AVX 10.1")
    assert (second.version, second.isa) == (first.version, first.isa)
    assert (len(first.primitives), len(second.primitives)) == (1, 2)
    assert capfd.readouterr().out == "mine\nand mine\n"


def test_nothing_is_said_of_onednn_where_it_executed_nothing(capfd):
    captured(INTRODUCTION + EXECUTED)
    assert captured("mine\n") == []
    assert capfd.readouterr().out == "mine\n"


def test_a_script_that_let_it_speak_before_leaves_it_unknown(capfd):
    assert read_log(captured(EXECUTED)).version is None
    assert capfd.readouterr().out == ""
