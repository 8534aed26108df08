"""The banded kernels compile for a Hopper GPU, with its matrix units, in its shared memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from longitude.ops.plan import Band, Chunk
from tests.ops.kernels.hopper import Spec, compiled, together

pytest.importorskip("triton")

from longitude.ops.kernels.banded import FINER, Blocks, blocks_for
from longitude.ops.kernels.banded_backward import STRIP
from longitude.ops.kernels.banded_backward import blocks_for as plan_for
from longitude.ops.kernels.launch import compiles_gluon

WHERE = "longitude.ops.kernels.banded"
SHARED = 227 * 1024
SHARES = ("blocks", "finer", "pairs")
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def types(dtype: torch.dtype, *tensors: str) -> dict[str, Any]:
    """The arguments that all kernels share, after tensors of q's type or, by name, of float32."""
    one, sums = (POINTER[dtype], "i64", "i64", "i64"), ("*fp32", "i64", "i64", "i64")
    wide = ("lse", "delta")
    found: dict[str, Any] = {name: sums if name in wide else one for name in tensors}
    if "dtable" in found:
        found["dtable"] = ("*fp32", "i32", "i32", "i32")
    found["table"] = ("*fp32", "i32", "i32", "i32")
    scales = ("fp32", "fp32")
    if "start" not in found:
        return found | {"reach": "*i32", "sizes": ("i32",) * 7, "scales": scales}
    found |= {"start": (one, sums), "shares": ("*fp32",) * 3, "reach": "*i32"}
    found |= {"sizes": ("i32",) * 3, "scales": scales}
    chunk = [f"chunk_{name}" for name in ("size", "lo", "hi", "row", "column")]
    return found | dict.fromkeys(["n", "m", "lo", "hi", "top", *chunk], "i32")


def spec(
    kernel: str, found: dict[str, Any], d: int, blocks: Blocks, **constants: int | bool | str
) -> Spec:
    aligned = [(n, at) for n, t in enumerate(found.values()) for at in range(4)
               if isinstance(t, tuple) and t[1:] == ("i64",) * 3]  # fmt: skip
    width = 1 << (d - 1).bit_length()
    run = constants.pop("RUN", 1 << (blocks.rows + blocks.columns - 2).bit_length())
    sizes = {"D": d, "DV": d, "WIDTH": width, "WIDTH_V": width}
    square = {"SIZE": blocks.rows} if "SIZE" in constants else {}
    blocked = square or {"ROWS": blocks.rows, "COLUMNS": blocks.columns}
    rest = {name: value for name, value in constants.items() if name != "SIZE"}
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return Spec(kernel, found, sizes | blocked | {"RUN": run} | rest, tuple(aligned), options)


def forward(
    d: int, dtype: torch.dtype, window: bool = True, started: bool = True, biased: bool = True,
    shares: str = "none",
) -> Spec:  # fmt: skip
    x = torch.empty(1, 1, 1, d, dtype=dtype, device="meta")
    found = types(dtype, "q", "k", "v", "out", "lse", "start")
    blocks = blocks_for(x, x, 128 if window else 4096, biased, shares != "none")
    coarser = {"finer": blocks.rows, "pairs": FINER.rows}.get(shares, 0)
    blocks = {"finer": FINER, "pairs": FINER._replace(stages=1)}.get(shares, blocks)
    bare: dict[str, int | bool] = {} if biased else {"RUN": 0}
    kind = "blocks" if shares == "finer" else shares
    return spec(f"{WHERE}:_kernel", found, d, blocks, SHARES=kind, STARTED=started,
                WINDOW=window, REACH=not window and biased and shares == "none",
                CHUNKED=not biased, COARSER=coarser, FINE=coarser, **bare)  # fmt: skip


def specialised(d: int, dtype: torch.dtype, bands: int = 1, **how: bool) -> Spec:
    """The kernel of specialised warps, whose q, k and v are descriptors of tiles."""
    from longitude.ops.kernels import hopper_launch as hopper

    others = types(dtype, "out", "lse", "start")
    found: dict[str, Any] = {}
    for name in ("q", "k", "q2", "k2", "v"):
        rows = hopper.ROWS if "q" in name else hopper.COLUMNS
        _, layout = hopper._tile(rows, d, dtype)
        found[name] = f"tensordesc<{POINTER[dtype][1:]}[1, 1, {rows}, {d}],{layout!r}>"
    names = ("out", "lse", "start", "table", "shares", "reach", "sizes", "scales")
    found |= {name: others[name] for name in names}
    found |= dict.fromkeys(("at_once", "n", "top"), "i32") | {"bands": (("i32",) * 10,) * bands}
    off = dict.fromkeys(("BIASED", "SHARES", "STARTED", "IN_PLACE", "REACH", "CHUNKED"), False)
    sizes = {"D": d, "ROWS": hopper.ROWS, "COLUMNS": hopper.COLUMNS, "STAGES": hopper.STAGES}
    aligned = [(n, at) for n, name in enumerate(found) for at in range(4) if name in ("out", "lse")]
    where = f"{WHERE}_hopper:kernel"
    return Spec(where, found, sizes | off | how, tuple(aligned), {"num_warps": 4})


def backward(d: int, dtype: torch.dtype) -> list[Spec]:
    x = torch.empty(1, 1, 1, d, dtype=dtype, device="meta")
    plan, where = plan_for(x, x), f"{WHERE}_backward"
    rows = types(dtype, "q", "k", "v", "out", "lse", "grad", "delta", "dq")
    columns = types(dtype, "q", "k", "v", "lse", "grad", "delta", "dk", "dv")
    diagonals = types(dtype, "q", "k", "v", "lse", "grad", "delta", "dtable")
    diagonals |= {"least": "i32", "near": "i32", "strips": "i32"}
    return [
        spec(f"{where}:_rows_kernel", rows, d, plan.rows, WINDOW=False, REACH=True),
        spec(f"{where}:_columns_kernel", columns, d, plan.columns, WINDOW=False, REACH=True,
             TAIL=False),
        spec(f"{where}:_diagonals_kernel", diagonals, d, plan.diagonals, SIZE=True, STRIP=STRIP,
             REACH=True),
    ]  # fmt: skip


def held(specs: list[Spec], dtype: torch.dtype) -> None:
    for one, made in zip(specs, compiled(specs), strict=True):
        assert made["shared"] <= SHARED, (one.kernel, made["shared"])
        assert ("wgmma.mma_async" in made["ptx"]) == (dtype != torch.float32), one.kernel


USUAL = together(
    [
        forward(64, torch.bfloat16, window=False, started=False),
        forward(128, torch.bfloat16, biased=False),
        *(forward(128, torch.bfloat16, False, False, shares=x) for x in SHARES),
    ]
)


SPECIALISED = together(
    [
        specialised(128, torch.bfloat16, STARTED=True, IN_PLACE=True),
        specialised(128, torch.bfloat16, bands=2),
        specialised(64, torch.float16, BIASED=True, REACH=True),
        specialised(128, torch.bfloat16, BIASED=True, SHARES=True),
        specialised(128, torch.bfloat16, STARTED=True, CHUNKED=True),
    ]
)


def test_forward_compiles() -> None:
    held(USUAL, torch.bfloat16)


def test_the_forward_of_specialised_warps_compiles() -> None:
    """A warp of its own copies tiles, and products run while exponentials are computed."""
    held(SPECIALISED, torch.bfloat16)
    for made in compiled(SPECIALISED):
        assert "cp.async.bulk.tensor.4d" in made["ptx"]
        assert "setmaxnreg.dec" in made["ptx"] and "wgmma.wait_group.sync.aligned 1" in made["ptx"]


def test_only_versions_of_triton_that_were_tried_have_specialised_warps() -> None:
    import triton

    assert compiles_gluon(triton.__version__), (
        "compile it with this version, and note that in GLUON"
    )
    assert compiles_gluon("3.6.0+git1234") and compiles_gluon("3.7.1")
    assert (
        not compiles_gluon("3.5.1") and not compiles_gluon("3.10.0") and not compiles_gluon("4.0.0")
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_every_kernel_compiles_for_every_head_size(d: int, dtype: torch.dtype) -> None:
    held([forward(d, dtype), forward(d, dtype, False, False), *backward(d, dtype)], dtype)
    if dtype != torch.float32:
        held([forward(d, dtype, False, False, shares=kind) for kind in SHARES], dtype)


@pytest.mark.parametrize(
    ("lanes", "columns", "band", "chunk", "at_once"),
    [
        (32, 8192, Band(0, 8192), None, 32),
        (32, 32768, Band(0, 32768), None, 8),
        (28, 32768, Band(0, 32768), None, 4),  # seven heads of keys are no multiple of two
        (32, 131072, Band(0, 131072), None, 4),
        (32, 131072, Band(0, 1024), None, 32),
        (32, 4, Band(0, 131072), None, 32),
        (32, 131072, Band(0, 131072), Chunk(4096, 0, 1, 0, 0), 32),
        (32, 131072, Band(0, 0), None, 32),
    ],
)
def test_heads_at_once_are_those_whose_keys_the_cache_holds(
    lanes: int, columns: int, band: Band, chunk: Chunk | None, at_once: int
) -> None:
    from longitude.ops.kernels.hopper_launch import heads_at_once

    few = (4, Band(0, 4), None)
    assert heads_at_once(lanes, 4, 128, ((columns, band, chunk), few)) == at_once


@pytest.mark.parametrize(
    ("lanes", "at_once", "n", "programs"), [(32, 4, 131072, 132), (12, 12, 1000, 7), (6, 2, 129, 5)]
)
def test_every_block_has_one_turn_and_neighbours_are_as_long(
    lanes: int, at_once: int, n: int, programs: int
) -> None:
    """A kernel's own arithmetic, by Python's numbers."""
    from longitude.ops.kernels.banded_hopper import ROWS, block_of

    blocks = -(-n // ROWS)
    units = -(-lanes * blocks // programs) * programs
    order = [block_of.fn(n_, programs, lanes, at_once, n, ROWS) for n_ in range(units)]
    own = [(at, lane) for at, lane in order if at >= 0]
    assert sorted(own) == sorted(product(range(0, n, ROWS), range(lanes)))
    rounds = [order[first : first + programs] for first in range(0, units, programs)]
    apart = programs // at_once + 2  # blocks, of programs that run at one time
    for round in rounds[:-1]:
        rows = [at // ROWS for at, _ in round]
        assert max(rows) - min(rows) <= apart and min(rows) >= 0
    assert {at for at, _ in own[-at_once:]} == {0} or len(rounds[-1]) == programs
