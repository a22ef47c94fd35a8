"""The dashboard's pages, and what stands on one, for tests without a browser."""

import json

from pandas.api.types import is_list_like

VIEWS = tuple(
    """runs overview verdict precision gradients layers updates operations formats
    tensor_cores training compare""".split()
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
    return "\n".join(str(e.value) for kind in (*_TEXTS, *_TITLES) for e in getattr(test, kind))


def commands(test):
    """The commands of a page that are ready to be copied."""
    blocks = [e.proto for e in test.get("bidi_component")]
    return [json.loads(b.json)["command"] for b in blocks if "command_block" in b.component_name]


def figures(test):
    return test.get("plotly_chart")


def as_text(frame):
    """The first rows of a table, without its small curves."""
    plain = [c for c in frame if not frame[c].map(is_list_like).any()]
    return frame[plain].head(8).to_csv(index=False, float_format="%.5g")


def page_text(test):
    """All that a page says, without receipts: its words, numbers, choices, tables and commands."""
    boxes = (
        *test.selectbox,
        *test.multiselect,
        *test.slider,
        *test.select_slider,
        *test.text_input,
    )
    chosen = [f"{b.label}: {b.value}{' (disabled)' * b.disabled}" for b in boxes]
    tables = [as_text(table.value) for table in test.dataframe]
    code = [block.value for block in test.code if block.language != "python"]
    parts = [words(test), *(f"{k}: {v}" for k, v in metrics(test).items()), *chosen, *tables]
    parts += [*(fold.label for fold in test.expander), *commands(test), *code]
    return "\n".join([*parts, f"{len(figures(test))} figures"]).replace("\\", "")
