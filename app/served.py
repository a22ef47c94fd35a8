"""The dashboard as ``mpdiag dashboard`` serves it: for who has its token, and with Plotly ahead.

Every user of a machine can reach its localhost. So an address carries a token, as Jupyter's does; the
first answer moves it into a cookie, and without either there is one page, which says how to get in.

Plotly is 4.7 MB of JavaScript. Streamlit loads it for the first figure, which is sent after the run was
read; fetched, compiled and run only then, it would hold back the first view.
"""

from __future__ import annotations

import os
import socket
import time
import webbrowser
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from secrets import compare_digest
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

import streamlit
from starlette.middleware import Middleware
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse
from streamlit.starlette import App

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHUNK = "PlotlyChart.*.js"
"""What Streamlit calls its part for Plotly figures."""
PATIENCE = 10.0
"""Seconds that a browser waits for the server to answer."""
TOKEN_VARIABLE = "MPDIAG_DASHBOARD_TOKEN"  # noqa: S105 - its name
"""The environment variable that holds the token; without it everybody is let in."""
HEALTH = "/_stcore/health"
"""Answers everybody: it says whether the server runs, and nothing of the runs."""
HOW_TO_GET_IN = """<!doctype html><html lang="en"><head><title>mpdiag</title></head><body><main>
<h1>This dashboard needs its token</h1>
<p><code>mpdiag dashboard</code> printed an address that ends in <code>?token=…</code> in the terminal
where it was started. Open that address.</p></main></body></html>"""
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


class TokenGate:
    """Lets in who has the token, by the address or by the cookie that the address is exchanged for."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, send the browser on with its cookie, or say how to get in."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == HEALTH:
            await self.app(scope, receive, send)
            return
        name = f"mpdiag-{(scope.get('server') or ('', 0))[1]}"  # cookies do not tell ports apart
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        # Other servers of this machine set cookies, too, some of which http.cookies cannot read.
        cookies = cookie_parser(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1"))
        if self._fits(cookies.get(name, "")):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif any(key == "token" and self._fits(value) for key, value in query):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            path = "/" + scope["path"].lstrip("/")  # two slashes would begin another host's address
            there = RedirectResponse(f"{path}?{rest}" if rest else path)
            there.set_cookie(name, self.token.decode(), httponly=True, samesite="strict")
            await there(scope, receive, send)
        else:
            await HTMLResponse(HOW_TO_GET_IN, 403)(scope, receive, send)

    def _fits(self, word: str) -> bool:
        return compare_digest(word.encode(), self.token)


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


def address_of(port: int, token: str) -> str:
    """Where the dashboard is, for a browser."""
    return f"http://localhost:{port}/" + (f"?token={token}" if token else "")


def open_once_it_listens(address: str, port: int) -> None:
    """Open the dashboard as soon as its server answers; not at all if it does not."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("localhost", port), 1.0):
            webbrowser.open(address)
            return
        time.sleep(0.05)


@asynccontextmanager
async def in_a_browser(_app: App) -> AsyncIterator[None]:
    """Print the address, and open it, as Streamlit does for a script, unless that was not wished."""
    port = int(streamlit.get_option("server.port"))
    address = address_of(port, TOKEN)
    print(f"The dashboard is at {address}", flush=True)
    if not streamlit.get_option("server.headless"):
        Thread(target=open_once_it_listens, args=[address, port], daemon=True).start()
    yield


TOKEN = os.environ.get(TOKEN_VARIABLE, "")
app = App(
    Path(__file__).with_name("main.py"),
    lifespan=in_a_browser,
    middleware=[*([Middleware(TokenGate, TOKEN)] if TOKEN else []), Middleware(PlotlyAhead)],
)
