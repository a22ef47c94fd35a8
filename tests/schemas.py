"""The JSON schemas in ``docs/schemas``, as they are published and closed.

A published schema lets a later version add fields where the design says so. In a closed one nothing
is open: a field that no schema describes is a fault.
"""

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}
SHARED = {"error", "finding", "plan"}
"""Those that are no command's."""


def _closed(part):
    """A schema in which no object may have a field that is not described."""
    if isinstance(part, dict):
        part = {key: _closed(value) for key, value in part.items()}
        return part | ({"additionalProperties": False} if part.get("properties") else {})
    return [_closed(value) for value in part] if isinstance(part, list) else part


@cache
def validator(name, *, closed):
    """The validator of a schema, which finds the others by their files."""
    known = {k: _closed(v) if closed else v for k, v in SCHEMAS.items()}
    files = Registry().with_resources(
        (f"{k}.json", Resource.from_contents(v)) for k, v in known.items()
    )
    return Draft202012Validator(known[name], registry=files)


def faults(name, document, *, closed=False):
    found = validator(name, closed=closed).iter_errors(document)
    return [f"{e.json_path}: {e.message[:200]}" for e in found]


def assert_described(name, document):
    """A document has the fields of its schema, and no other."""
    assert not faults(name, document, closed=True)
