"""Ways to the page of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from mpdiag.display.wording import layer_name

if TYPE_CHECKING:
    from mpdiag.numerics.formats import FloatFormat
    from mpdiag.runs.schema import Kind

_WAITING = "layer_to_open"


def open_layer(
    name: str, kind: Kind, fmt: FloatFormat | None = None, exponent: int | None = None
) -> None:
    """Leave for the page of a layer, which shows the same tensors, format and scale.

    They are handed on in the session: an address that widgets of this page are bound to may not be
    changed by anything else.
    """
    asked: dict[str, str | int] = {"layer": layer_name(name), "kind": kind}
    if fmt is not None:
        asked["format"] = fmt.name
    if exponent is not None:
        asked["scale"] = exponent
    st.session_state[_WAITING] = asked
    if "layer" in st.session_state:  # on the page of layers itself
        st.rerun()
    st.switch_page("views/layers.py", query_params={"layer": layer_name(name)})


def take_opened() -> None:
    """Set the widgets of the layer's page to what was asked for, before they are drawn."""
    for key, value in st.session_state.pop(_WAITING, {}).items():
        st.session_state[key] = value


def unless_set(key: str, **default: Any) -> dict[str, Any]:
    """A widget's default, unless its value is set already: both would contradict each other."""
    return {} if key in st.session_state else default
