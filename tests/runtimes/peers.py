"""Other people's rope code, out of their own wheels, without what those need to be installed.

PEER_WHEELS names a folder with wheels (vllm, sglang, exllamav3, transformers 4.x: fetched with
`pip download --no-deps`), which are large; without it the tests that use them are skipped. Modules
that are about rotation are loaded as they are; every other module of the package is a stand-in.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ABSENT = ("vllm", "torch_npu", "aiter")  # of no use on a CPU, but asked for


class CustomOp(nn.Module):
    """vLLM's base class of operators: a registry, and nothing that matters here."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    @classmethod
    def register(cls, name: str, **_: Any) -> Any:
        return lambda kind: kind

    @classmethod
    def enabled(cls) -> bool:
        return False


class Nothing:
    """What a stand-in has under every name: it can be called, has every name too, and is false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__


class StandIn(ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"CustomOp": CustomOp, "BaseFusedOp": CustomOp}.get(name) or Nothing()


class _Finder(MetaPathFinder, Loader):
    """Real modules from a folder where the name has a real prefix, stand-ins for the others."""

    def __init__(self, package: str, folder: Path, real: tuple[str, ...]) -> None:
        self.package, self.folder, self.real = package, folder, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in (self.package, *ABSENT):
            return None
        if name.startswith(self.real):
            stem = self.folder.joinpath(*name.split("."))
            inner = stem / "__init__.py"
            file = inner if inner.is_file() else stem.with_suffix(".py")
            where = [str(stem)] if inner.is_file() else None
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=where
            )
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def unpacked(wheel: str, tmp: Path) -> Path:
    """The Python files of a wheel, in a folder; skips the test where there is no such wheel."""
    folder = os.environ.get("PEER_WHEELS")
    found = sorted(Path(folder).glob(f"{wheel}*.whl")) if folder else []
    if not found:
        pytest.skip(f"set PEER_WHEELS to a folder with the wheel of {wheel}")
    with zipfile.ZipFile(found[-1]) as held:
        wanted = ("rotary", "rope", "config", "hf_transformers", "util/file")
        names = [n for n in held.namelist() if n.endswith(".py") and any(w in n for w in wanted)]
        held.extractall(tmp, names)
    return tmp


@contextmanager
def loaded(package: str, folder: Path, module: str, *real: str) -> Iterator[ModuleType]:
    """One module of an unpacked wheel, loaded while the block runs."""
    held = (package, *ABSENT)
    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] in held}
    for name in before:
        del sys.modules[name]
    finder = _Finder(package, folder, real or (module,))
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] in held]:
            del sys.modules[name]
        sys.modules.update(before)


def function(file: Path, name: str, **names: Any) -> Any:
    """One function of a file, with these names around it."""
    tree = ast.parse(file.read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.returns = None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    scope: dict[str, Any] = dict(names)
    exec(compile(ast.Module([node], []), str(file), "exec"), scope)
    return scope[name]


def turned(cos_sin: torch.Tensor) -> tuple[list[float], float]:
    """The frequencies and the factor behind the table row of position 1."""
    cos, sin = cos_sin[1].double().chunk(2)
    sizes = torch.hypot(cos, sin)
    assert torch.allclose(sizes, sizes[:1].expand_as(sizes), rtol=1e-6)
    return torch.atan2(sin, cos).tolist(), float(sizes[0])


def close(found: tuple[float, ...], theirs: list[float], tolerance: float = 2e-6) -> None:
    """Every frequency as theirs, as far as float32 goes."""
    assert len(found) == len(theirs)
    for ours, other in zip(found, theirs, strict=True):
        assert math.isclose(ours, other, rel_tol=tolerance, abs_tol=1e-12), (ours, other)


def attributes(config: Mapping[str, Any]) -> Any:
    """A dictionary as an object."""
    return type("Config", (), dict(config))()
