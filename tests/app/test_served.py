"""The dashboard's server: who is let in, pages that load Plotly ahead, the browser that it opens."""

import asyncio
import socket
import sys
import threading

import pytest

pytest.importorskip("streamlit.starlette", reason="needs Streamlit, of the extra `app`")

PAGE = b"<html><head><title>x</title></head><body><div></div></body></html>"


@pytest.fixture
def served(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "app"))
    monkeypatch.delitem(sys.modules, "served", raising=False)
    import served

    return served


def answer(served, body, content_type, place="/static/js/Plotly.js", status=200, path="/runs"):
    """What a browser is sent of a page that comes in two pieces, and the request's headers."""
    asked, sent = [], []

    async def inner(scope, receive, send):
        asked.append(dict(scope["headers"]))
        length = str(len(body)).encode()
        headers = [(b"content-type", content_type), (b"content-length", length), (b"etag", b"e")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:20], "more_body": True})
        await send({"type": "http.response.body", "body": body[20:], "more_body": False})

    async def send(message):
        sent.append(message)

    app = served.PlotlyAhead(inner)
    app.place = place
    headers = [(b"accept", content_type), (b"accept-encoding", b"gzip")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(app(scope, None, send))
    return dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:]), asked[0]


def through_the_gate(served, path, query="", cookie="", kind="http"):
    """What the server sends, first message first; ``{"type": "inside"}`` where the app is reached."""
    sent = []

    async def inner(_scope, _receive, send):
        await send({"type": "inside"})

    async def send(message):
        sent.append(message)

    headers = [(b"cookie", cookie.encode())] if cookie else []
    scope = {"type": kind, "method": "GET", "path": path, "query_string": query.encode("latin-1")}
    scope |= {"headers": headers, "server": ("localhost", 8501)}
    asyncio.run(served.TokenGate(inner, "right")(scope, None, send))
    return sent


@pytest.mark.parametrize("path", ["/", "/runs", "/media/x.json", "/_stcore/agent/mcp"])
@pytest.mark.parametrize(
    ("query", "cookie"),
    [("", ""), ("token=", ""), ("token=wrong", ""), ("run=right", ""), ("token=r%C3%ADght", ""),
     ("x=\xff", ""), ("", "mpdiag-8501=wrong"), ("", "mpdiag-8502=right"), ("", "mpdiag-8501")],
)  # fmt: skip
def test_without_the_token_nothing_is_said_but_how_to_get_in(served, path, query, cookie):
    start, body = through_the_gate(served, path, query, cookie)
    assert start["status"] == 403
    assert b"printed an address that ends in <code>?token=" in body["body"]
    assert b"right" not in body["body"]
    assert through_the_gate(served, path, query, cookie, "websocket")[0]["code"] == 1008


def test_the_token_becomes_a_cookie_and_leaves_the_address(served):
    start, *_ = through_the_gate(served, "/layers", "run=a%20b&token=right&empty=")
    headers = dict(start["headers"])
    assert (start["status"], headers[b"location"]) == (307, b"/layers?run=a+b&empty=")
    cookie = headers[b"set-cookie"].decode()
    assert {"mpdiag-8501=right", "HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    for kind in ("http", "websocket"):
        sent = through_the_gate(served, "/layers", "", f"other=1; {cookie.split(';')[0]}", kind)
        assert sent == [{"type": "inside"}]
    assert through_the_gate(served, served.HEALTH) == [{"type": "inside"}]


@pytest.mark.parametrize("other", ['a={"b": 1}', "a=[1, 2]", "a:b=1", "a", "a=\xe9", "path=/"])
def test_cookies_of_other_servers_do_not_lock_out(served, other):
    sent = through_the_gate(served, "/", "", f"{other}; mpdiag-8501=right")
    assert sent == [{"type": "inside"}]


@pytest.mark.parametrize("path", ["//elsewhere.example/x", "///elsewhere.example/x"])
def test_the_token_leads_to_no_other_host(served, path):
    start, *_ = through_the_gate(served, path, "token=right")
    assert dict(start["headers"])[b"location"] == b"/elsewhere.example/x"


def test_streamlit_has_plotly_where_pages_are_told(served):
    place = served.chunk()
    assert place is not None
    static = served.Path(served.streamlit.__file__).parent / "static"
    assert (static / place[1:]).stat().st_size > 1_000_000


def test_a_page_is_told_where_plotly_is(served):
    headers, page, asked = answer(served, PAGE, b"text/html; charset=utf-8")
    text = page.decode()
    assert '<link rel="modulepreload" crossorigin href="/static/js/Plotly.js"></head>' in text
    assert 'import("/static/js/Plotly.js")' in text
    assert text.index("<div></div>") < text.index('<script type="module">')
    assert headers[b"content-length"] == str(len(page)).encode()
    assert headers[b"etag"] == b"e"
    assert b"accept-encoding" not in asked  # it could not be completed packed


@pytest.mark.parametrize(
    ("kind", "place", "status"),
    [
        (b"application/json", "/static/js/Plotly.js", 200),
        (b"text/html", None, 200),  # this Streamlit calls it otherwise
        (b"text/html", "/static/js/Plotly.js", 404),
    ],
)
def test_what_is_no_page_of_ours_stays_as_it_is(served, kind, place, status):
    headers, body, _ = answer(served, PAGE, kind, place, status)
    assert body == PAGE
    assert headers[b"content-length"] == str(len(PAGE)).encode()


def test_a_streamlit_without_that_file_loads_plotly_by_itself(served, tmp_path, monkeypatch):
    monkeypatch.setattr(served.streamlit, "__file__", str(tmp_path / "__init__.py"))
    assert served.chunk() is None


@pytest.fixture
def opened(served, monkeypatch):
    """The addresses that were opened in a browser."""
    found = []
    monkeypatch.setattr(served.webbrowser, "open", found.append)
    return found


@pytest.mark.parametrize("headless", [True, False])
def test_a_browser_is_opened_once_the_server_answers_unless_it_was_not_wished(
    served, opened, monkeypatch, capsys, headless
):
    before = set(threading.enumerate())
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        options = {"server.headless": headless, "server.port": port}
        monkeypatch.setattr(served.streamlit, "get_option", options.__getitem__)

        async def live():
            async with served.in_a_browser(served.app):
                pass

        asyncio.run(live())
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
    assert opened == ([] if headless else [f"http://localhost:{port}/"])
    assert capsys.readouterr().out == f"The dashboard is at http://localhost:{port}/\n"
    assert served.address_of(port, "x") == f"http://localhost:{port}/?token=x"


def test_a_browser_waits_for_the_server_and_not_for_ever(served, opened, monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(served, "PATIENCE", 0.2)
    served.open_once_it_listens("http://there", port)
    assert opened == []
    monkeypatch.setattr(served, "PATIENCE", 20.0)
    waiting = threading.Thread(target=served.open_once_it_listens, args=["http://there", port])
    waiting.start()
    with socket.create_server(("localhost", port)):
        waiting.join(20)
    assert opened == ["http://there"]
