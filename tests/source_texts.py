"""What stands in a module's code: its texts, without its docstrings, and what it imports."""

import ast
from collections.abc import Iterator
from pathlib import Path


def template(node: ast.AST) -> str | None:
    """A literal's text, with the names of what an f-string fills in; ``None`` of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        part.value if isinstance(part, ast.Constant) else f"{{{filled_in(part.value)}}}"
        for part in node.values
    )


def filled_in(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return filled_in(function)
        case ast.Subscript(value=value):
            return filled_in(value)
    return "…"


def texts(source: str) -> Iterator[str]:
    """All texts of a module, in the order of its code."""

    def inside(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            text = template(child)
            if text is None:
                yield from inside(child)
                continue
            yield text
            if isinstance(child, ast.JoinedStr):
                for part in child.values:
                    if isinstance(part, ast.FormattedValue):
                        yield from inside(part)

    return inside(ast.parse(source))


def imported_names(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each import of a file: the module named, and the names taken from it (none: itself)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            assert node.module is not None
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            function = function.id if isinstance(function, ast.Name) else function
            if function == "import_module":
                yield str(node.args[0].value), []
