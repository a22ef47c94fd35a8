"""What ``mpdiag profile`` prints of a CPU."""

from __future__ import annotations

from calls import printed

from mpdiag.tensorcores.cpu.matrix_unit import CpuFacts, CpuProfile
from mpdiag.tensorcores.reports.profile import cpu_profile_text


def test_a_finding_has_its_fix_on_a_line_of_its_own_as_on_a_gpu():
    finding = {"severity": "warning", "code": "no-log", "message": "No log.", "fix": "set it"}
    device = CpuFacts("EPYC", has_amx=False, has_avx512_bf16=True)
    text = printed(cpu_profile_text(CpuProfile(device, (), (), 1, (finding,))))
    lines = [line.rstrip() for line in text.splitlines()]
    at = lines.index("warning: No log.")
    assert lines[at + 1] == "  set it  [no-log]"
