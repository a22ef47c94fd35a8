"""The dashboard's pages, and what stands on one, for tests without a browser."""

from __future__ import annotations

import json

VIEWS = (
    "runs",
    "overview",
    "verdict",
    "gradients",
    "layers",
    "updates",
    "operations",
    "tensor_cores",
    "training",
    "compare",
)
_TEXTS = ("markdown", "caption", "info", "warning", "error", "success")
_TITLES = ("title", "header", "subheader")


def metrics(test):
    return {metric.label: metric.value for metric in test.metric}


def titles(test):
    """All headings, as they are read."""
    found = [str(e.value) for kind in _TITLES for e in getattr(test, kind)]
    return [title.replace("\\", "") for title in found]


def words(test):
    """All text on the page."""
    return "\n".join(str(e.value) for kind in (*_TEXTS, *_TITLES) for e in getattr(test, kind))


def commands(test):
    """The commands of a page that are ready to be copied."""
    blocks = [e.proto for e in test.get("bidi_component")]
    return [json.loads(b.json)["command"] for b in blocks if "command_block" in b.component_name]


def figures(test):
    """The figures of a page."""
    return test.get("plotly_chart")
