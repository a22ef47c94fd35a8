"""The floors of the house, read from the syntax trees.

An import points strictly downward, or to a sibling in the same room. It counts wherever it stands:
at the top, inside a function, under TYPE_CHECKING, or as ``import_module("…")``.
"""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_texts import imported_names

PACKAGE = "mpdiag"

# From the ground up. A room is a folder of the package, or a module beside the folders; rooms on one
# floor do not import each other.
FLOORS = [
    ["version", "errors", "display", "hardware"],
    ["numerics", "installation", "profiler"],
    ["files", "tracing"],
    ["plan", "runs", "emulation"],
    ["recording", "analysis", "exports"],
    ["precision"],
    ["training", "reports"],
    ["sensitivity", "launching", "workloads", "integrations"],
    ["tensorcores"],
    ["demo"],
    ["commands"],
    ["cli"],
    ["__main__"],
]

ROOMS = {
    f"{PACKAGE}.{room}": (height, room) for height, rooms in enumerate(FLOORS) for room in rooms
}
SEAM, PLUGIN = f"{PACKAGE}.profiler", f"{PACKAGE}.tensorcores"
"""The module that looks the Tensor Core profiler up, and names it for type checkers; and its folder."""
ATTIC = (len(FLOORS), "")  # the package root, which shows everything and which nobody imports


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def place(module: str) -> tuple[int, str] | None:
    """Floor and room of a module; None if the table has no place for it."""
    if module == PACKAGE:
        return ATTIC
    name = module
    while name not in ROOMS and "." in name:
        name = name.rpartition(".")[0]
    return ROOMS.get(name)


def edges(house: dict[str, Path]) -> dict[str, set[str]]:
    """For each module, the modules of this package that it imports."""
    result: dict[str, set[str]] = {}
    for module, path in house.items():
        result[module] = targets = set()
        for source, names in imported_names(path):
            if source.split(".")[0] != PACKAGE or (module == SEAM and source.startswith(PLUGIN)):
                continue
            assert source in house, f"{module} imports {source}, which does not exist"
            # `from package import name` means the module of that name, where there is one.
            parts = {n: f"{source}.{n}" if f"{source}.{n}" in house else source for n in names}
            targets.update(parts.values() if names else [source])
    return result


def upward(graph: dict[str, set[str]]) -> list[str]:
    """The imports that do not point downward, as sentences."""
    wrong = []
    for module, targets in graph.items():
        floor, room = place(module) or ATTIC
        for target in targets - {module}:
            target_floor, target_room = place(target) or ATTIC
            if not (target_floor < floor or (target_floor, target_room) == (floor, room)):
                wrong.append(f"{module} imports {target}")
    return sorted(wrong)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter({m: targets - {m} for m, targets in graph.items()}).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def beyond_the_app(root: Path) -> list[str]:
    """What ``app/`` imports and should not: torch, or any of the package but facts and views."""
    rooms = ["version", "errors", "display", "numerics", "installation", "profiler", "files"]
    rooms += [
        "plan",
        "runs",
        "analysis",
        "reports",
        "tensorcores.timeline.ranks",
        "tensorcores.trace_analysis",
        "tensorcores.views",
    ]
    allowed = [f"{PACKAGE}.{name}" for name in rooms]
    wrong = []
    for path in sorted((root / "app").rglob("*.py")):
        for source, names in imported_names(path):
            for whole in [f"{source}.{name}" for name in names] or [source]:
                inside = any(f"{whole}.".startswith(f"{name}.") for name in allowed)
                top = source.split(".")[0]
                if top == "torch" or (top == PACKAGE and not inside):
                    wrong.append(f"{path.name} imports {whole}")
    return wrong


def names_the_plugin(root: Path) -> list[str]:
    """The modules outside the profiler's folder, other than the seam, in which its name stands."""
    files = [p for p in (root / PACKAGE).rglob("*.py") if PLUGIN.rpartition(".")[2] not in p.parts]
    seam = root / f"{SEAM.replace('.', '/')}.py"
    return [str(p) for p in files if p != seam and PLUGIN in p.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def house(root):
    return modules(root)


@pytest.fixture(scope="module")
def graph(house):
    return edges(house)


def test_every_module_has_a_floor_and_every_folder_is_a_package(house, root):
    assert [module for module in house if place(module) is None] == []
    folders = {path.parent for path in (root / PACKAGE).rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").is_file()] == []


def test_imports_point_downward_without_a_cycle_and_none_to_the_root(graph):
    assert upward(graph) == []
    assert cycle(graph) == []
    assert [module for module, targets in graph.items() if PACKAGE in targets] == []


def test_nothing_but_the_seam_names_the_profiler_and_the_app_never_imports_torch(root):
    assert names_the_plugin(root) == []
    assert beyond_the_app(root) == []


@pytest.fixture
def build(tmp_path):
    def write(**files: str) -> dict[str, Path]:
        files["__init__"] = ""
        for name, text in files.items():
            path = tmp_path / PACKAGE / f"{name.replace('_in_', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return modules(tmp_path)

    return write


@pytest.mark.parametrize(
    "text",
    [
        "import mpdiag.runs.run",
        "from mpdiag import runs",
        "from mpdiag.runs.run import open_run",
        "def f():\n    from mpdiag.runs.run import open_run",
        "if TYPE_CHECKING:\n    from mpdiag.runs.run import Run",
        "import importlib\nimportlib.import_module('mpdiag.runs.run')",
        "from importlib import import_module\nimport_module('mpdiag.runs.run')",
    ],
)
def test_an_upward_import_is_seen_wherever_it_stands(build, text):
    wanted = "runs" if "import runs" in text else "runs.run"
    house = build(numerics_in_formats=text, runs_in___init__="", runs_in_run="")
    assert upward(edges(house)) == [f"mpdiag.numerics.formats imports mpdiag.{wanted}"]


def test_rooms_of_one_floor_are_apart_and_siblings_import_each_other_in_no_circle(build):
    house = build(analysis_in_a="import mpdiag.recording.b", recording_in_b="", runs="")
    assert upward(edges(house)) == ["mpdiag.analysis.a imports mpdiag.recording.b"]
    house = build(analysis_in_a="import mpdiag.analysis.b", analysis_in_b="")
    assert (upward(edges(house)), cycle(edges(house))) == ([], [])
    house = build(analysis_in_b="def f():\n    import mpdiag.analysis.a")
    assert upward(edges(house)) == []
    assert set(cycle(edges(house))) == {"mpdiag.analysis.a", "mpdiag.analysis.b"}


def test_a_room_holds_all_that_lies_in_it():
    assert place("mpdiag.hardware.devices") == place("mpdiag.hardware.peaks")
    assert place("mpdiag.hardware.devices") < place("mpdiag.tensorcores.readers.ncu")
    assert place("mpdiag.nowhere") is None


def test_the_app_is_watched(tmp_path):
    (tmp_path / "app").mkdir()
    lines = ["from mpdiag.reports import text", "from mpdiag import runs"]
    lines += ["from mpdiag.runs.run import open_run", "import pandas, mpdiag.recording"]
    lines += ["def f():", "    from torch.nn import Module"]
    (tmp_path / "app" / "page.py").write_text("\n".join(lines))
    expected = ["page.py imports mpdiag.recording", "page.py imports torch.nn.Module"]
    assert beyond_the_app(tmp_path) == expected
