"""A command to copy.

Streamlit's own block of code loads 1.6 MB of JavaScript that colours programs, and runs it before the
figures of the page are drawn.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

_block = st.components.v2.component(
    "mpdiag_command_block",
    html='<div class="command"><pre><code></code></pre><button>Copy</button></div>',
    css=Path(__file__).with_name("command_block.css").read_text(encoding="utf-8"),
    js=Path(__file__).with_name("command_block.js").read_text(encoding="utf-8"),
)


def command_block(command: str, key: str) -> None:
    """Show a command with a button that copies it.

    Args:
        command: As it is typed.
        key: Its own among the commands of the page.
    """
    _block(key=f"command-{key}", data={"command": command})
