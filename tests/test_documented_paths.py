"""Scripts and result files that documentation and docstrings name exist."""

from __future__ import annotations

import re

PATHS = re.compile(r"\b(?:benchmarks|studies|sample_runs)/[\w/-]+\.(?:py|json(?:\.gz)?)\b")
FOLDERS = ("mpdiag", "app", "benchmarks", "studies", "sample_runs", "docs", "examples")


def test_they_exist(root):
    texts = [root / "README.md", root / "CONTRIBUTING.md", root / "Makefile"]
    for folder in FOLDERS:
        texts += [p for p in (root / folder).rglob("*") if p.suffix in (".py", ".md")]
    missing = {
        f"{text.relative_to(root)}: {path}"
        for text in texts
        for path in PATHS.findall(text.read_text(encoding="utf-8"))
        if not (root / path).exists()
    }
    assert missing == set()
