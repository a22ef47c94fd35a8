"""The app without a browser."""

from __future__ import annotations

import pytest


@pytest.fixture
def opened(root, monkeypatch):
    """Open the app on a folder of runs, with query parameters."""

    testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra `app`")

    def open_app(folder=root / "sample_runs", view="runs", **query):
        monkeypatch.setenv("MPDIAG_RUNS", str(folder))
        test = testing.AppTest.from_file(str(root / "app" / "main.py"), default_timeout=60)
        for name, value in query.items():
            test.query_params[name] = value
        return test.switch_page(f"views/{view}.py").run()

    return open_app
