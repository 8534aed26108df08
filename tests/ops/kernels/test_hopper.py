"""Turning, joining, stacking and adding up compile for Hopper: whole vectors moved, little shared
memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ops.kernels.hopper import Spec, compiled, together

pytest.importorskip("triton")


def turning(
    dtype: str, d: int, half: int, adjacent: bool, blocks: tuple[int, int, int] = (16, 4, 4),
    twice: bool = False,
) -> Spec:  # fmt: skip
    constants = {
        "HALF": half, "REST": d - 2 * half, "ADJACENT": adjacent, "INVERSE": False,
        "TOKENS": blocks[0], "HEADS": blocks[1], "WIDTH": 1 << (half - 1).bit_length(),
        "REST_WIDTH": 1 << max(d - 2 * half - 1, 0).bit_length(),
    }  # fmt: skip
    types: dict[str, Any] = {}
    for x in "qk":
        types |= {x: f"*{dtype}", f"{x}_out": f"*{dtype}", f"{x}_cos": "*fp32", f"{x}_sin": "*fp32"}
        if twice:
            types |= {f"{x}_far": f"*{dtype}", f"{x}_far_cos": "*fp32", f"{x}_far_sin": "*fp32"}
    aligned = [(n,) for n in range(len(types))]
    if twice:
        types |= {"of_q_far": ("i32",) * 5, "of_k_far": ("i32",) * 5}
        types |= dict.fromkeys(("q_first", "k_first", "q_count", "k_count"), "i32")
    types |= {"of_q": ("i32",) * 9, "of_k": ("i32",) * 9}
    types |= dict.fromkeys(("q_lanes", "lanes", "chunk", "q_tokens", "k_tokens"), "i32")
    for n, (name, kind) in enumerate(types.items()):  # strides, but not how many heads there are
        if isinstance(kind, tuple):
            aligned += [(n, at) for at in range(0 if "far" in name else 1, len(kind))]
    kernel = f"longitude.ops.kernels.rope:_rope_{'twice_' * twice}kernel"
    return Spec(kernel, types, constants, tuple(aligned), {"num_warps": blocks[2]})


def joining(dtype: str, d: int, parts: int, running: bool, sink: bool) -> Spec:
    width = 1 << (d - 1).bit_length()
    constants = {"D": d, "WIDTH": width, "ROWS": 2048 // width, "RUNNING": running, "SINK": sink}
    numbers = ["first", "last", "heads", "rows", "ob", "oh", "on", "blocks"]
    types = {
        "parts": ((f"*{dtype}", "*fp32", *["i32"] * 16),) * parts,
        "so_far": "*fp32", "so_far_lse": "*fp32", "sinks": "*fp32", "out": f"*{dtype}",
        "lse": "*fp32", **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    rows = tuple((0, n, j) for n in range(parts) for j in (0, 1, 8, 9, 10, 11, 12))
    aligned = (*rows, *((n,) for n in (1, 2, 3, 4, 5, 10, 11, 12)))
    kernel = "longitude.ops.kernels.merge:_merge_kernel"
    return Spec(kernel, types, constants, aligned, {"num_warps": 4})


def stacking(dtype: str, d: int, flipped: bool) -> Spec:
    width = 1 << (d - 1).bit_length()
    constants = {"D": d, "WIDTH": width, "ROWS": 4096 // width, "FLIPPED": flipped}
    types = {"sources": ((f"*{dtype}", f"*{dtype}", *["i32"] * 10),) * 3, "batch": "i32"}
    aligned = tuple((0, n, j) for n in range(3) for j in (0, 1, 9, 10, 11))
    kernel = "longitude.ops.kernels.merge:_stack_kernel"
    return Spec(kernel, types, constants, aligned, {"num_warps": 4})


def adding_up(dtype: str, d: int, half: int, adjacent: bool, parts: int) -> Spec:
    given = ((f"*{dtype}", "*fp32", "*fp32", *["i32"] * 11),) * parts
    numbers = ("heads", "tokens", "groups", "lanes", "chunk", "ob", "oh", "on")
    types = {"parts": given, "out": f"*{dtype}", **dict.fromkeys(numbers, "i32")}
    constants = {
        "HALF": half, "REST": d - 2 * half, "ADJACENT": adjacent, "TOKENS": 4, "HEADS": 2,
        "WIDTH": 1 << max(half - 1, 0).bit_length(),
        "REST_WIDTH": 1 << max(d - 2 * half - 1, 0).bit_length(),
    }  # fmt: skip
    rows = tuple((0, n, j) for n in range(parts) for j in (0, 1, 2, *range(8, 14)))
    aligned = (*rows, *((n,) for n in (1, 7, 8, 9)))
    kernel = "longitude.ops.kernels.gradients:_kernel"
    return Spec(kernel, types, constants, aligned, {"num_warps": 1})


def tabulating(beyond: bool) -> Spec:
    weights = ("inward", "inward_bias", "outward", "outward_bias", "c", "multiplier")
    made = ("table", "pace", "steepest", "own_c")
    numbers = {"by_unit": "i32", "by_head": "i32", "threshold": "fp32"}
    numbers |= dict.fromkeys(("first", "farthest", "rows", "heads"), "i32")
    types = dict.fromkeys(weights, "*bf16") | dict.fromkeys(made, "*fp32") | numbers
    constants = {"HIDDEN": 32, "STEPS": 2**14, "BLOCK": 1024, "BEYOND": beyond}
    aligned = tuple((n,) for n in range(len(weights) + len(made)))
    return Spec("longitude.ops.kernels.fire:_kernel", types, constants, aligned, {"num_warps": 4})


USUAL = together([turning("bf16", 128, 64, False), turning("bf16", 128, 64, False, (4, 2, 1), True),
                  joining("bf16", 128, 3, True, True),
                  adding_up("bf16", 128, 64, False, 3)])  # fmt: skip
OTHERS = [
    turning("bf16", 128, 64, True),
    turning("bf16", 80, 40, False),
    turning("fp32", 256, 32, True, (8, 2, 4)),
    turning("bf16", 128, 64, True, (1, 8, 2)),
    joining("bf16", 80, 4, False, False),
    joining("fp32", 256, 1, False, True),
    stacking("bf16", 128, True),
    stacking("fp32", 80, False),
    adding_up("bf16", 128, 64, False, 6),
    adding_up("bf16", 128, 32, True, 3),
    adding_up("bf16", 128, 0, False, 3),
]


@pytest.mark.parametrize("specs", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper(specs: list[Spec]) -> None:
    for spec, made in zip(specs, compiled(specs), strict=True):
        moved = re.findall(r"(?:ld|st)\.global\S*", made["ptx"])
        assert made["shared"] <= 16 * 1024
        assert ".local" not in made["ptx"], "registers would spill"
        assert any(name.startswith("ld.global.v4.b32") for name in moved), moved
        written = [name for name in moved if name.startswith("st")]
        single = [name for name in written if ".v4.b32" not in name]  # one log-sum-exp a row
        assert len(single) == spec.kernel.count("merge_kernel") and len(written) > len(single)


def test_the_table_of_fire_compiles_for_hopper() -> None:
    for made in compiled([tabulating(False), tabulating(True)]):
        assert ".local" not in made["ptx"] and made["shared"] <= 1024
        assert "atom.global.gpu.acq_rel.max" in made["ptx"]
