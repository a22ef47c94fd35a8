"""The rest of the site: the API has every public name, pictures are what their script draws."""

from __future__ import annotations

import importlib.util
import re

import pytest
from doc_pages import PAGES, ROOT, text

import mpdiag


def test_the_api_page_has_every_public_name_and_no_other():
    documented = re.findall(r"^::: mpdiag\.(\w+)$", text("docs/api.md"), flags=re.MULTILINE)
    assert set(documented) == set(mpdiag.__all__) - {"__version__"}


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, picture in module.pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == picture


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text(page)):
        assert target.startswith("https://") or (here / target).exists(), target
    named = re.findall(
        r"`((?:mpdiag|tests|benchmarks|studies|docs|examples)/[\w./-]+)`", text(page)
    )
    for path in named:
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_menu():
    listed = set(re.findall(r"[\w/-]+\.md", text("mkdocs.yml")))
    assert listed == {p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")}
