"""Launches of kernels that Triton has compiled: what its launcher is called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from longitude.ops.kernels import launch as launches

FIXED = {"N": 4, "num_warps": 2}


class Pointer(torch.Tensor):
    """As much of a tensor on a GPU as a launch reads."""

    at, device = 32, torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return self.at


def pointer(at: int = 32, device: int = 0) -> Pointer:
    made = torch.empty(0).as_subclass(Pointer)
    made.at, made.device = at, torch.device("cuda", device)
    return made


class Fake:
    """A kernel, and what Triton makes of it; it notes its calls."""

    arg_names = ("x", "n", "N")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fn = object()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Fake:
            self.calls.append(("compile" if options else "long", grid, *args))
            return self

        return call

    def run(self, *args: Any) -> None:
        self.calls.append(("short", *args))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, and those that were made current before it."""
    devices = [0]

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        devices.append(one.index)
        yield
        devices.append(devices[0])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 100 + n, raising=False)
    monkeypatch.setattr(launches, "_compiled", {})
    return devices


def test_the_second_launch_calls_the_launcher_itself(current: list[int]) -> None:
    kernel, grid, x = Fake(), (3, 1, 1), pointer()
    given: Any = (kernel, grid, (7,), (x,), ("key",), lambda: FIXED, True)
    for _ in range(2):
        launches.launch(*given)
    short = ("short", *grid, 100, "function", "metadata", None, None, None, 32, 7, 4)
    assert kernel.calls == [("compile", grid, x, 7), short]
    unaligned = (kernel, grid, (7,), (pointer(33),), *given[4:])
    launches.launch(*unaligned)
    assert kernel.calls[-1][0] == "compile"
    assert current == [0]


def test_hooks_and_untried_versions_go_the_long_way(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, grid, x = Fake(), (3, 1, 1), pointer()
    given: Any = (kernel, grid, (x, 7), (x,), ("key",), lambda: FIXED)
    launches.launch(*given)
    hook = launches._runtime().launch_enter_hook
    hook.add(print)
    launches.launch(*given)
    hook.remove(print)
    assert kernel.calls[-1] == ("long", grid, x, 7, 4)
    launches.launch(*given)
    assert kernel.calls[-1] == ("short", *grid, 100, *"function metadata".split(), None, None, None,
                                x, 7, 4)  # fmt: skip
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches, "_runtime", lambda: None)
    for _ in range(2):
        launches.launch(*given)
    assert kernel.calls[-1] == ("long", grid, x, 7, 4)


def test_tensors_of_another_device_make_it_current(current: list[int]) -> None:
    kernel, x = Fake(), pointer(device=1)
    for _ in range(2):
        launches.launch(kernel, (3, 1, 1), (7,), (x,), ("key",), lambda: FIXED, True)
    assert current == [0, 1, 0, 1, 0]
    assert kernel.calls[-1][4] == 101
