"""The dashboard as ``mpdiag dashboard`` serves it: its pages load Plotly before a figure asks.

Plotly is 4.7 MB of JavaScript. Streamlit loads it for the first figure, which is sent after the run was
read; fetched, compiled and run only then, it would hold back the first view.
"""

from __future__ import annotations

import socket
import time
import webbrowser
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import streamlit
from starlette.middleware import Middleware
from streamlit.starlette import App

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHUNK = "PlotlyChart.*.js"
"""What Streamlit calls its part for Plotly figures."""
PATIENCE = 10.0
"""Seconds that a browser waits for the server to answer."""
SCRIPT = Path(__file__).with_name("plotly_ahead.js")


def chunk() -> str | None:
    """Where the server has Plotly; None if this Streamlit calls it otherwise: then figures load it."""
    static = Path(streamlit.__file__).parent / "static"
    found = sorted(static.rglob(CHUNK))
    return f"/{found[0].relative_to(static).as_posix()}" if len(found) == 1 else None


def with_plotly(page: bytes, place: str) -> bytes:
    """A page that fetches Plotly from ``place`` beside its own scripts, and runs it after them."""
    hint = f'<link rel="modulepreload" crossorigin href="{place}">'
    script = SCRIPT.read_text(encoding="utf-8").replace("PLACE", place)
    return page.replace(b"</head>", hint.encode() + b"</head>", 1).replace(
        b"</body>", f'<script type="module">{script}</script></body>'.encode(), 1
    )


class PlotlyAhead:
    """Writes into each HTML page where Plotly is."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.place = chunk()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on; a page that is answered is completed."""
        if scope["type"] != "http" or scope["method"] != "GET" or self.place is None:
            await self.app(scope, receive, send)
            return
        place, started, body = self.place, [], bytearray()

        async def complete(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message):
                started.append(message)
            elif not started:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    page = with_plotly(bytes(body), place)
                    size = (b"content-length", str(len(page)).encode())
                    others = [h for h in started[0]["headers"] if h[0] != size[0]]
                    await send({**started[0], "headers": [*others, size]})
                    await send({**message, "body": page})

        # A page of some kilobytes from this machine: packed, it would have to be unpacked here.
        plain = [header for header in scope["headers"] if header[0] != b"accept-encoding"]
        asks = b"text/html" in dict(plain).get(b"accept", b"")
        await self.app({**scope, "headers": plain} if asks else scope, receive, complete)


def _is_page(message: Message) -> bool:
    headers = dict(message["headers"])
    page = headers.get(b"content-type", b"").startswith(b"text/html")
    return page and message["status"] == 200 and b"content-encoding" not in headers


def open_once_it_listens(port: int) -> None:
    """Open the dashboard as soon as its server answers; not at all if it does not."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("localhost", port), 1.0):
            webbrowser.open(f"http://localhost:{port}")
            return
        time.sleep(0.05)


@asynccontextmanager
async def in_a_browser(_app: App) -> AsyncIterator[None]:
    """Open the dashboard in a browser, as Streamlit does for a script, unless that was not wished."""
    if not streamlit.get_option("server.headless"):
        port = int(streamlit.get_option("server.port"))
        Thread(target=open_once_it_listens, args=[port], daemon=True).start()
    yield


app = App(
    Path(__file__).with_name("main.py"),
    lifespan=in_a_browser,
    middleware=[Middleware(PlotlyAhead)],
)
