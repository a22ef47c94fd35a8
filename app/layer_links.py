"""Ways to the page of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.display.wording import layer_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.schema import Kind

_WAITING = "layer_to_open"


def open_layer(
    name: str, kind: Kind, fmt: FloatFormat | None = None, exponent: int | None = None
) -> None:
    """Leave for the page of a layer, which shows the same tensors, format and scale.

    What a widget of this session holds is handed on in the session, as the address it is bound to may
    not be changed by anything else; the rest goes into the address, which nothing would write later.
    """
    asked: dict[str, str | int] = {"layer": layer_name(name), "kind": kind}
    if "run" in st.session_state:  # the address of the layer's page is to name it
        asked["run"] = st.session_state["run"]
    address = {"layer": layer_name(name)}
    seen = {"format": None if fmt is None else fmt.name, "scale": exponent}
    for key, value in seen.items():
        if value is not None and key in st.session_state:
            asked[key] = value
        elif value is not None:
            address[key] = str(value)
    st.session_state[_WAITING] = asked
    if "layer" in st.session_state:  # on the page of layers itself
        st.rerun()
    st.switch_page("views/layers.py", query_params=address)


def take_opened() -> None:
    """Set the widgets of the layer's page to what was asked for, before any of them is drawn."""
    for key, value in st.session_state.pop(_WAITING, {}).items():
        st.session_state[key] = value


def take_word(key: str, known: Collection[str]) -> None:
    """Set a widget to a word of the address, such as ``mxfp4``: by itself it takes labels alone."""
    asked = st.query_params.get(key)
    if asked in known:
        st.session_state.setdefault(key, asked)


def unless_set(key: str, **default: Any) -> dict[str, Any]:
    """A widget's default, unless its value is set already: both would contradict each other."""
    return {} if key in st.session_state else default
