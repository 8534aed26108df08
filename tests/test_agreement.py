"""Every preset × every backend × every way to call it equals float64 eager, or refuses in a
sentence.

Cells that refuse stand in `agreement_refusals.txt`: a cell that starts or stops refusing fails here
until the file says so too (run this file as a program to write it anew).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Cache, UserError, attention
from longitude.core.part import Pos
from tests.grid import HEADS, TOKENS, Layer, positions, rows, schemes, tokens

TOLERANCE = 2e-5
SCHEMES = schemes()
BACKENDS = ("eager", "native", "flex")
REFUSALS = Path(__file__).with_name("agreement_refusals.txt")
Cell = Callable[[Any, str], Iterator[tuple[Tensor, Tensor]]]


@lru_cache(maxsize=16)  # the backends of a scheme come one after another
def reference(
    scheme: Any,
    kv_heads: int,
    batch: int,
    row: int | None = None,
    start: int = 0,
    end: int = TOKENS,
) -> Tensor:
    """Float64 eager over some tokens of all rows or of one, with positions from the first on."""
    x = tokens(batch=batch)[:, start:end]
    x = x if row is None else x[row : row + 1]
    return Layer(scheme, kv_heads).dense(x, positions(scheme, end - start), backend="eager")


def dense(scheme: Any, backend: str, kv_heads: int = HEADS) -> Iterator[tuple[Tensor, Tensor]]:
    x, pos = tokens(batch=2), positions(scheme, TOKENS)
    got = Layer(scheme, kv_heads, torch.float32).dense(x, pos, backend=backend)
    yield got, reference(scheme, kv_heads, 2)


def gqa(scheme: Any, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    yield from dense(scheme, backend, HEADS // 2)


def chunks(scheme: Any, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    # uncompiled flex takes its time: fewer pieces there, as of a decode
    yield from in_pieces(scheme, backend, [23, 1, 16] if backend == "flex" else [17, 6, 1, 16])


def decode(scheme: Any, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = [1, 1, 1, 17, *[1] * (TOKENS - 20)]  # from nothing, and after a prefill
    yield from in_pieces(scheme, backend, [TOKENS - 1, 1] if backend == "flex" else sizes)


def in_pieces(scheme: Any, backend: Any, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    x, pos, want = tokens(), positions(scheme, TOKENS), reference(scheme, 2, 1)
    layer = Layer(scheme, 2, torch.float32)
    q, k, v = layer.qkv(x, pos)
    cache = Cache(scheme, length=TOKENS, slack=0) if scheme.causal else None
    gates, start = layer.gates(x, pos), 0
    for size in sizes:
        here = slice(start, start + size)
        keys, values, k_pos, now = k, v, pos, cut(pos, here)
        start += size
        if gates is not None and cache is not None:  # the cache adds them up itself
            cache.add(k[:, :, here], v[:, :, here], now, None, gates[:, :, here])
            got = cache.attend(q[:, :, here], now, layer.weights, backend=backend)
            yield got, want[:, :, here]
            continue
        if cache is not None:
            keys, values, k_pos, _ = cache.update(k[:, :, here], v[:, :, here], now)
        got = attention(
            scheme,
            q[:, :, here],
            keys,
            values,
            now,
            k_pos,
            layer.weights,
            backend=backend,
            length=TOKENS,
        )
        yield got, want[:, :, here]


def cut(pos: Pos, here: slice) -> Pos:
    return pos[here]


def padded(scheme: Any, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    short = 25
    x, pad = tokens(batch=2), TOKENS - short
    every = [positions(scheme, TOKENS), positions(scheme, short)]
    pos = torch.stack(
        [rows(every[0]), torch.cat([rows(every[1])[:1].expand(pad) * 0, rows(every[1])])]
    )
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, :pad] = True
    got = Layer(scheme, 2, torch.float32).dense(x, pos, backend=backend, key_padding=padding)
    yield got[:1], reference(scheme, 2, 2, 0)
    yield got[1:, :, pad:], reference(scheme, 2, 2, 1, pad)


def packed(scheme: Any, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = (23, 5, TOKENS - 28)
    x, every = tokens(), [positions(scheme, n) for n in sizes]
    pos, ids = (
        rows(*every)[None],
        torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])[None],
    )
    got = Layer(scheme, 2, torch.float32).dense(x, pos, backend=backend, segments=ids)
    start = 0
    for n in sizes:
        yield got[:, :, start : start + n], reference(scheme, 2, 1, None, start, start + n)
        start += n


WAYS: dict[str, Cell] = {
    "dense": dense,
    "gqa": gqa,
    "chunks": chunks,
    "decode": decode,
    "padded": padded,
    "packed": packed,
}


def ways_of(name: str) -> dict[str, Cell]:
    causal = SCHEMES[name].causal
    return {way: cell for way, cell in WAYS.items() if causal or way != "decode"}


@torch.no_grad()
def run(name: str, backend: str) -> tuple[dict[str, float], dict[str, str]]:
    """The greatest error of each cell that ran, and the sentence of each that refused."""
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for way, cell in ways_of(name).items():
        try:
            pairs = list(cell(SCHEMES[name], backend))
        except UserError as why:
            refused[way] = str(why)
            continue
        errors[way] = max(float((got - want).abs().max()) for got, want in pairs)
    return errors, refused


def recorded(name: str, backend: str) -> set[str]:
    lines = [line.split(" | ") for line in REFUSALS.read_text().splitlines() if " | " in line]
    return {way for preset, with_, way, *_ in lines if (preset, with_) == (name, backend)}


@pytest.mark.unchecked  # types are checked in the gradients' test: eager and native, every scheme
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_agrees_with_float64_eager(name: str, backend: str, record_property: Any) -> None:
    errors, refused = run(name, backend)
    record_property("cells ran", len(errors))
    record_property("cells refused", len(refused))
    assert all(error <= TOLERANCE for error in errors.values()), errors
    assert all(line.endswith(".") and "\n" not in line for line in refused.values()), refused
    assert set(refused) == recorded(name, backend), f"refusals changed: {refused}"


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_agree_with_eager(name: str) -> None:
    scheme, n = SCHEMES[name], TOKENS
    found = []
    for backend in ("eager", "native"):
        layer = Layer(scheme, 2)
        q, k, v = (t.detach().requires_grad_() for t in layer.qkv(tokens(), positions(scheme, n)))
        weights = {key: w.detach().requires_grad_() for key, w in layer.weights.items()}
        pos = positions(scheme, n)
        gates = layer.gates(tokens(), pos, weights)
        sums = None if gates is None else gates.cumsum(-1)
        try:
            out = attention(scheme, q, k, v, pos, pos, weights, backend=backend, forget_sums=sums)  # type: ignore[arg-type]
        except UserError:
            assert "dense" in recorded(name, backend)
            return
        rng = torch.Generator().manual_seed(2)
        (out * torch.randn(out.shape, generator=rng, dtype=out.dtype)).sum().backward()
        found.append([t.grad for t in (q, k, v, *weights.values())])
    for eager, native in zip(*found, strict=True):
        assert (eager is None) == (native is None)
        assert eager is None or torch.allclose(eager, native, rtol=0, atol=1e-10)


def write() -> None:
    """Write down which cells refuse, and why."""
    import torch.nn.attention.flex_attention as flex

    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]
    lines = ["Cells of the agreement grid that refuse: preset | backend | way | why"]
    for name in SCHEMES:
        for backend in BACKENDS:
            lines += [
                f"{name} | {backend} | {way} | {why}" for way, why in run(name, backend)[1].items()
            ]
    REFUSALS.write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 1} cells refuse: {REFUSALS}")


if __name__ == "__main__":
    write()
