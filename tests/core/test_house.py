"""The house rules of the package: its budget by folder, and imports that go one way.

Budgets are lines of Python, docstrings included. A folder that needs more is a reason to simplify
it, or to change its line here with an argument in the commit.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import longitude

ROOT = Path(longitude.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}
LINES, FILE_COUNT = 49_747, 236  # the aim is 33,000 lines: lower it as folders shrink
BUDGET = {
    "(top)": 650,
    "core": 1_877,  # locks of folders, the client of servers and the one reader of JSON files, too
    "presets": 563,
    "parts": 3_773,  # tables of biases for CPUs and their gradients, too
    # over several ranks, biases on CPUs, a kernel for Hopper GPUs with two bands in one launch, and
    # parts of gradients added up, both rotations of a remap in one launch each, and which heads
    # share a cache, too
    "ops": 8_706,
    "cache": 1_005,  # tables of many steps at once, too
    "hf": 6_306,  # over several ranks, saved schemes, adapters, layers that differ, caches, too
    "eval": 2_404,  # the last tokens alone in the last layer, too
    "inspection": 2_348,
    "reading": 2_171,
    "training": 3_938,  # how many processes share a sequence, by memory, too
    "runtimes": 4_245,  # what released checkpoints have of their own, rotations by type of layer
    "serving": 782,  # the vLLM plugin
    "extension": 3_796,  # tasks side by side on a CPU, over ranks and on Ray, too
    "probing": 1_979,  # what a live server does
    "viz": 3_025,
    "explorer": 1_170,
    "cli": 1_133,
    "assets": 100,
}
FILE_LINES, FUNCTION_LINES = 450, 60
# a module may import from the layers before its own; core's scheme and text forms build on parts
LAYERS = (
    ("core",),
    ("parts",),
    ("core.scheme",),
    ("presets",),
    ("core.text",),
    ("ops",),
    ("cache", "nn"),
    ("hf",),
    ("serving",),
    ("eval",),
    ("inspection",),
    ("reading", "training", "runtimes"),
    ("extension",),
    ("probing",),
    ("viz",),
    ("explorer", "cli"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ONLY_IN = {"triton": ("ops/kernels/",)}
# what draws needs no torch: a report is built and the explorer's page served without it
WITHOUT_TORCH = ("viz/", "core/store.py", "core/progress.py", "core/validate.py")


def where(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def folder(file: Path) -> str:
    return where(file).split("/")[0] if "/" in where(file) else "(top)"


def lines(file: Path) -> int:
    return file.read_text().count("\n")


def layer(name: str) -> str | None:
    """The layer of a dotted name below longitude, if it is in one."""
    parts = name.split(".")
    both = ".".join(parts[:2])
    return both if both in RANK else parts[0] if parts[0] in RANK else None


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports at its top level; names of a package count as its own."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_package_stays_within_its_budget():
    by_folder = Counter[str]()
    for file in FILES:
        by_folder[folder(file)] += lines(file)
    over = {name: n for name, n in by_folder.items() if n > BUDGET.get(name, 0)}
    assert not over, f"over budget: {over}"
    assert by_folder.total() <= LINES and len(FILES) <= FILE_COUNT


def test_files_and_functions_stay_small():
    long_files = {where(file): lines(file) for file in FILES if lines(file) > FILE_LINES}
    long_functions = [
        f"{where(file)}:{node.name}"
        for file in FILES
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno >= FUNCTION_LINES  # options are no body
    ]
    assert not long_files and not long_functions


def test_imports_go_one_way():
    wrong = []
    for file in FILES:
        own = layer(where(file).removesuffix(".py").replace("/", "."))
        for name in imported(TREES[file]):
            top = name.split(".")[0]
            if top in ONLY_IN and not where(file).startswith(ONLY_IN[top]):
                wrong.append(f"{where(file)} imports {name}")
            if top == "torch" and where(file).startswith(WITHOUT_TORCH):
                wrong.append(f"{where(file)} imports {name}")
            other = layer(name.removeprefix("longitude.")) if top == "longitude" else None
            if own and other and own != other and RANK[other] >= RANK[own]:
                wrong.append(f"{where(file)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_layer_and_a_budget():
    folders = {folder(file) for file in FILES}
    assert folders <= set(BUDGET)
    assert folders - {"(top)", "assets"} <= set(RANK)
