"""The import arrows of the design, and the sizes that files and functions keep."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import longitude

ROOT = Path(longitude.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
RANKS = [
    *({"fields", "region", "atomic"}, {"part"}, {"parts"}, {"scheme"}, {"presets"}, {"text"}),
    {"attention"},
    *({"nn", "cache"}, {"hf"}, {"eval"}, {"inspect", "lab", "read", "stream"}),
    *({"export", "report"}, {"extend"}, {"explore"}, {"bench"}, {"cli"}),
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
ONLY_IN = {"transformers": "hf", "triton": "attention/triton"}
WITHOUT_TORCH = ("record.py", "report/build.py")


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names that a tree imports, wherever they stand, save for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def room(name: str) -> str:
    """The room of longitude.room.module; the package's own names lead to where they live."""
    first = name.split(".")[1] if "." in name else ""
    return longitude._HOME.get(first, first).split(".")[0]


def where(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def home(file: Path) -> str:
    """The room that a file belongs to; `python -m longitude` is the command line."""
    first = where(file).removesuffix(".py").split("/")[0]
    return "cli" if first == "__main__" else first


@pytest.mark.parametrize("file", FILES, ids=where)
def test_imports_go_one_way(file):
    here = home(file)
    for name in imports(ast.parse(file.read_text())):
        top = name.split(".")[0]
        if top in ONLY_IN:
            assert where(file).startswith(ONLY_IN[top]), f"{top} is imported in {ONLY_IN[top]} only"
        assert not (top == "torch" and where(file) in WITHOUT_TORCH)
        if top != "longitude" or room(name) in ("record", here) or name == "longitude.__version__":
            continue
        assert here != "record", "record imports nothing of longitude"
        assert RANK[room(name)] < RANK.get(here, -1), f"{where(file)} may not import {name}"


def test_every_room_has_its_rank():
    rooms = {home(f) for f in FILES} - {"__init__", "record"}
    assert rooms <= set(RANK), "a new room needs its place in the order of imports"


@pytest.mark.parametrize("file", FILES, ids=where)
def test_files_and_functions_stay_small(file):
    text = file.read_text()
    a_part = where(file).startswith("parts/") and file.name != "__init__.py"
    assert len(text.splitlines()) <= (80 if a_part else 300)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, node.name
