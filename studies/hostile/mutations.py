"""Ways to corrupt real files: bytes, JSON values, table cells, columns.

Every function takes a ``random.Random``, so that a seed names an input.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

TEXTS = (
    *("", " ", "\0", "\x1b[2J\x1b]0;owned\x07", "\u202egnp.exe", "\ud800", "a\rb\nc", "\x9b31m"),
    *("../../../etc/passwd", "/etc/passwd", "..", "C:\\windows", "file:///etc/passwd", "~root"),
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style>", "[/bold][red]x"),
    *("=1+1", "=HYPERLINK(0)", "@SUM(A1)", "+1", "-1", "${HOME}", "$(id)", "%s%n", "{0}{x}"),
    *("nan", "inf", "-inf", "1e999", "0x10", "1_000", "٣", "x" * 5_000, "é" * 300, "a.b.c" * 200),
    *("fp16", "fp8_e4m3", "activation_grad", "kernel", "tensor_core", "needed", "complete"),
)
NUMBERS: tuple[Any, ...] = (
    *(0, -0.0, 1, -1, 2, 255, 2**31, -(2**31), 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(1e-320, 5e-324, 1e18, 1.7e308, float("inf"), float("-inf"), float("nan"), 0.5, -1e-9, True),
)
_MARKER = "\u0001raw:"


def value(rng: Random) -> Any:
    """A value that some reader did not expect."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice(NUMBERS)
    if kind == 6:
        return rng.choice((None, False, [], {}, [[]], [None], {"": None}, [1, "a", None]))
    return _MARKER + rng.choice(("[" * 3_000, '{"a":' * 3_000, "9" * 5_000, "[" * 200 + "]" * 200))


# -- bytes -----------------------------------------------------------------------------------------


def _flip(data: bytearray, rng: Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: Random) -> None:
    del data[rng.randrange(len(data)) :]


def _drop(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 64)]


def _repeat(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randint(1, 200)] * rng.randint(1, 20)


def _insert(data: bytearray, rng: Random) -> None:
    junk = rng.choice(
        (b"\0" * 9, b"\xff\xfe", b'"', b"{", b"]", b"\n\n", b",,,", b"\x1b[2J", b"PAR1")
    )
    at = rng.randrange(len(data))
    data[at:at] = junk


def _number(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + 1] = rng.choice((b"9" * 30, b"-", b"1e999", b"NaN", b"Infinity", b"0" * 9))


def _words(data: bytearray, rng: Random) -> None:
    """Four bytes of a length, as binary formats have them."""
    at = rng.randrange(len(data))
    data[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80"))


def corrupt_bytes(data: bytes, rng: Random) -> bytes:
    """Some bytes of a file changed, lost or repeated."""
    corrupted = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if corrupted:
            rng.choice((_flip, _flip, _cut, _drop, _repeat, _insert, _number, _words))(
                corrupted, rng
            )
    return bytes(corrupted)


# -- JSON ------------------------------------------------------------------------------------------


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every place in a document: its container and its key there."""
    found, waiting = [], [document]
    while waiting:
        node = waiting.pop()
        keys = (
            node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        )
        for key in keys:
            found.append((node, key))
            waiting.append(node[key])
    return found


def corrupt_document(document: Any, rng: Random) -> Any:
    """A JSON document with some values replaced, dropped, doubled or renamed; changed in place."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        places = _places(document)
        if not places:
            return value(rng)
        node, key = rng.choice(places)
        what = rng.randrange(6)
        if what == 0:
            del node[key]
        elif what == 1 and isinstance(node, list):
            node[key:key] = [node[key]] * rng.randint(1, 5)
        elif what == 2 and isinstance(node, dict):
            node[str(rng.choice(TEXTS))] = node.pop(key)
        elif what == 3:
            other, place = rng.choice(places)
            node[key] = json.loads(json.dumps(other[place]))
        else:
            node[key] = value(rng)
    return document


def to_text(document: Any, rng: Random) -> str:
    """Hostile JSON: NaN, keys twice, values nested deep."""
    text = json.dumps(document, indent=rng.choice((None, None, 2)), ensure_ascii=rng.random() < 0.8)
    start = text.find(json.dumps(_MARKER)[1:-1])
    while start >= 0:  # what JSON's writer would not write
        end = text.find('"', start)
        start, raw = start - 1, text[start + len(json.dumps(_MARKER)) - 2 : end]
        text = text[:start] + raw.replace("\\", "") + text[end + 1 :]
        start = text.find(json.dumps(_MARKER)[1:-1])
    if rng.random() < 0.05 and text.startswith("{"):
        text = "{" + text[1:].rstrip().removesuffix("}") + "," + text[1:]
    return text


def corrupt_json(data: bytes, rng: Random) -> bytes:
    """A JSON file, corrupted as a document or as bytes."""
    if rng.random() < 0.3:
        return corrupt_bytes(data, rng)
    document = corrupt_document(json.loads(data), rng)
    return to_text(document, rng).encode("utf-8", "surrogatepass")


def corrupt_lines(data: bytes, rng: Random) -> bytes:
    """A file of JSON lines."""
    lines = data.splitlines()
    if rng.random() < 0.3 or not lines:
        return corrupt_bytes(data, rng)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        try:
            lines[at] = corrupt_json(lines[at], rng).replace(b"\n", b" ")
        except (ValueError, RecursionError):  # it is corrupted already
            lines[at] = corrupt_bytes(lines[at], rng)
    return b"\n".join(lines) + (b"\n" if rng.random() < 0.8 else b"")


def corrupt_packed(data: bytes, rng: Random) -> bytes:
    """A gzip file of JSON: corrupted inside, or the file itself."""
    if rng.random() < 0.2:
        return corrupt_bytes(data, rng)
    return gzip.compress(corrupt_json(gzip.decompress(data), rng), compresslevel=1, mtime=0)


# -- tables of text --------------------------------------------------------------------------------


def corrupt_csv(data: bytes, rng: Random) -> bytes:
    """A CSV file: cells replaced, columns and rows lost or doubled."""
    import csv
    import io

    if rng.random() < 0.3:
        return corrupt_bytes(data, rng)
    rows = list(csv.reader(io.StringIO(data.decode())))
    for _ in range(rng.randint(1, 6)):
        row = rng.choice(rows)
        what = rng.randrange(6)
        if what == 0:
            rows.remove(row)
        elif what == 1:
            rows.insert(rng.randrange(len(rows) + 1), list(row))
        elif row:
            at = rng.randrange(len(row))
            if what == 2:
                del row[at]
            elif what == 3:
                row.insert(at, row[at])
            else:
                row[at] = str(value(rng)).removeprefix(_MARKER)
        if not rows:
            break
    out = io.StringIO()
    # What csv.writer refuses or quotes cleverly is written plainly.
    for row in rows:
        quoted = ('"' + cell.replace('"', '""') + '"' for cell in row)
        out.write(",".join(quoted if rng.random() < 0.7 else row) + rng.choice(("\n", "\r\n")))
    return out.getvalue().encode("utf-8", "surrogatepass")


# -- databases and Parquet -------------------------------------------------------------------------


def corrupt_database(data: bytes, rng: Random) -> bytes:
    """An sqlite file: values of other types, lost columns and tables, views that never end."""
    import sqlite3
    from contextlib import closing, suppress

    if rng.random() < 0.4:
        return corrupt_bytes(data, rng)
    with closing(sqlite3.connect(":memory:")) as base:
        base.deserialize(data)
        tables = [t for (t,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        for _ in range(rng.randint(1, 5)):
            table = rng.choice(tables)
            with suppress(sqlite3.Error, OverflowError, UnicodeEncodeError, IndexError):
                columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
                column, what = rng.choice(columns), rng.randrange(8)
                if what == 0:
                    base.execute(f"DROP TABLE {table}")
                elif what == 1:
                    base.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
                elif what == 2:
                    base.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
                elif what == 3:
                    base.execute(f"INSERT INTO {table} SELECT * FROM {table}")
                elif what == 4:
                    base.execute(f"DROP TABLE {table}")
                    base.execute(f"CREATE VIEW {table} AS {_endless(columns)}")
                else:
                    new = value(rng)
                    new = rng.choice((b"\xff\0", new)) if isinstance(new, str) else new
                    new = new if isinstance(new, str | bytes | int | float | None) else str(new)
                    base.execute(
                        f"UPDATE {table} SET {column} = ? WHERE rowid % ? = 0",
                        (new, rng.randint(1, 3)),
                    )
        base.commit()
        return base.serialize()


def _endless(columns: list[str]) -> str:
    names = ", ".join(f"n AS {name}" for name in columns)
    return f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT {names} FROM c"


def corrupt_parquet(data: bytes, rng: Random) -> bytes:
    """A Parquet file: bytes, or columns of other types, names and values."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.5:
        return corrupt_bytes(data, rng)
    table = pq.read_table(io.BytesIO(data))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(table.num_columns)
        name, column = table.column_names[at], table.column(at)
        what = rng.randrange(5)
        if what == 0 and table.num_columns > 1:
            table = table.remove_column(at)
            continue
        if what == 1:
            changed = pa.nulls(len(column), column.type)
            table = table.set_column(at, name, changed)
            continue
        if what == 2:
            other = pa.array(
                [str(rng.choice(TEXTS)).encode("utf-8", "replace").decode()] * len(column)
            )
            table = table.set_column(at, name, other)
            continue
        cells = column.to_pylist()
        for _ in range(rng.randint(1, 4)):
            if cells:
                cells[rng.randrange(len(cells))] = _cell(column.type, rng)
        try:
            table = table.set_column(at, name, pa.array(cells, _plain(column.type)))
        except (pa.ArrowException, OverflowError, ValueError, TypeError, UnicodeError):
            continue
    if rng.random() < 0.1:
        table = table.slice(0, 0)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _plain(kind: Any) -> Any:
    return getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind


def _cell(kind: Any, rng: Random) -> Any:
    """A value of a column's type, at its edges."""
    text = str(kind)
    if text.startswith("list"):
        inner = kind.value_type
        return rng.choice((None, [], [_cell(inner, rng)] * rng.choice((1, 3, 400))))
    if text.startswith(("int", "uint")):
        width = int(text.lstrip("uint"))
        return rng.choice((None, 0, -1, 1, 2 ** (width - 1) - 1, -(2 ** (width - 1)), 300))
    if text in ("double", "float"):
        return rng.choice((None, 0.0, -1.0, float("nan"), float("inf"), 1e308, 5e-324))
    if "binary" in text:
        return rng.choice((None, b"", b"\xff" * 9))
    if text == "bool":
        return rng.choice((None, True, False))
    return rng.choice((None, *(t for t in TEXTS if "\ud800" not in t)))


CORRUPTIONS: dict[str, Callable[[bytes, Random], bytes]] = {
    "bytes": corrupt_bytes,
    "json": corrupt_json,
    "lines": corrupt_lines,
    "packed": corrupt_packed,
    "csv": corrupt_csv,
    "database": corrupt_database,
    "parquet": corrupt_parquet,
}
