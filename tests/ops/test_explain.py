"""What `explain` says against what `attention` does."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import UserError, attention
from longitude.ops import aten as operators
from longitude.ops import attention as runner
from longitude.ops import banded, eager
from longitude.ops import sdpa as native
from longitude.ops.attention import AUTO, considered
from longitude.ops.explain import explain
from longitude.ops.inputs import prepare
from tests.grid import scheme

N = 640
TEXTS = [
    "rope()",
    "causal() + logn(64)",
    "rope(remap=leaky_rerope(48, 4))",
    "rope(remap=dual_chunk(96, 24))",
    "rope() + window(64, sinks=4)",
    "rope(frequencies=stepped('yarn', original=128))",
    "alibi()",
    "rope(remap=rerope(48)) + alibi()",
    "shaw(8, values=True)",
]


def inputs(rows: int = N) -> tuple[Any, ...]:
    q, k, v = torch.randn(3, 1, 2, N, 16, generator=torch.Generator().manual_seed(0))
    return q[:, :, N - rows :], k, v, range(N - rows, N), range(N)


def weights(text: str) -> dict[str, Tensor]:
    from longitude import Dims

    return scheme(text).init(Dims(32, 2, 16), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [N, 1, 0])
@pytest.mark.parametrize("text", TEXTS)
def test_it_names_what_runs(text: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(scheme(text), *inputs(rows), weights(text))
    ran: list[str] = []
    for module in (native, eager):
        name = module.__name__.rsplit(".", 1)[1]
        own = module.run
        monkeypatch.setattr(module, "run", lambda p, n=name, r=own: (ran.append(n), r(p))[1])
    attention(scheme(text), *inputs(rows), weights(text))
    assert ran == [told.backend]


@pytest.mark.parametrize("text", [t for t in TEXTS if "remap" in t or "window" in t])
def test_tiles_and_calls_are_those_that_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(scheme(text), *inputs())
    said = re.search(r"(\d+) tiles in (\d+) calls", told.way)
    batches: list[int] = []
    own = operators.CPU.forward

    def counted(q: Tensor, *rest: Any) -> operators.Ran:
        batches.append(q.shape[0])
        return own(q, *rest)

    monkeypatch.setattr(
        "longitude.ops.sdpa.quickest_for",
        lambda q: operators.Operator(counted, operators.CPU.backward),
    )
    attention(scheme(text), *inputs())
    if said is None:
        assert not batches
    else:
        assert (sum(batches), len(batches)) == (int(said[1]), int(said[2]))


def test_it_prints_the_regions_as_they_are() -> None:
    told = explain(scheme("rope(remap=leaky_rerope(48, 4)) + window(500, sinks=4)"), *inputs())
    near, far = told.passes
    # rows in blocks of 48, a triangle each, one before it for all but the first; the last block has
    # 16 rows, so that beside its smaller triangle a rectangle is left
    assert str(near) == "where 0 <= i-j < 48: 14 lower, 13 upper, 1 full"
    assert far.where == ("48 <= i-j < 500", "500 <= i-j and j < 4")
    assert far.turns == "q at i/4 + 36, k at j/4"
    dual = explain(scheme("rope(remap=dual_chunk(96, 24))"), *inputs())
    assert "q at min((i mod 72) + 72, 96), k at (j mod 72)" in str(dual)
    assert "q at 96, k at (j mod 72)" in str(dual)
    assert "⌊i/4⌋" in str(explain(scheme("rope(remap=self_extend(4, 48))"), *inputs()))


def test_it_names_our_own_kernel_for_a_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "few", lambda p: p)  # as on a CUDA device
    told = explain(scheme("rope(remap=rerope(48))"), *inputs(1))
    assert told.way == "our own kernel for a few queries, which turns keys as it reads them"


def test_it_names_the_bands_of_our_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    there = import_module("longitude.ops.explain")
    monkeypatch.setattr(there, "module", lambda *_: banded)  # as on a CUDA device
    text = "rope() + window(64, sinks=4)"
    assert explain(scheme(text), *inputs()).way == "2 bands by our own kernel, in one softmax"
    monkeypatch.setattr(banded, "LARGE", 64)
    banded._plain.cache_clear()
    told = explain(scheme("rope(remap=leaky_rerope(48, 4))"), *inputs())
    banded._plain.cache_clear()
    assert told.way == (
        "592 × 592 by torch's CPU kernel, then 1 band by our own kernel, in one softmax"
    )


def test_every_backend_before_the_chosen_one_has_its_reason() -> None:
    s = "rope(remap=rerope(48)) + alibi()"
    told = explain(scheme(s), *inputs())
    assert told.backend == "eager" and "contiguous positions" in told.refused["native"]
    assert [*told.refused, told.backend] == [*AUTO[: len(told.refused) + 1]]
    assert all(f"not {name}: {why}" in str(told) for name, why in told.refused.items())


def test_a_backend_asked_for_is_told_or_refused_as_attention_does() -> None:
    told = explain(scheme("rope()"), *inputs(), backend="eager")
    assert (told.backend, told.refused) == ("eager", {})
    with pytest.raises(UserError, match="native can't run"):
        explain(scheme("rope()"), *inputs(), backend="native", softcap=30.0)
    with pytest.raises(UserError, match="no backend is called 'quick'"):
        explain(scheme("rope()"), *inputs(), backend="quick")


class OnCuda(Tensor):
    """A tensor that says it is where it is not."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("text", "rows", "dtype", "passed_over"),
    [
        ("alibi()", N, torch.bfloat16, ""),
        ("alibi()", N, torch.float32, "alibi"),  # whose sums round more than plain attention's
        ("alibi()", 8, torch.bfloat16, "banded"),  # too few for its programs
        ("alibi()", 1, torch.bfloat16, "banded alibi flex"),
        ("rope()", N, torch.bfloat16, "banded alibi flex"),
        ("rope(remap=leaky_rerope(48, 4))", N, torch.float16, "alibi flex"),
        ("rope(remap=leaky_rerope(48, 4))", N, torch.float32, "banded alibi flex"),
        ("rope() + window(64, sinks=4)", N, torch.bfloat16, "alibi flex"),
    ],
)
def test_on_cuda_kernels_are_chosen_by_the_call(
    text: str,
    rows: int,
    dtype: torch.dtype,
    passed_over: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "few", lambda p: None)  # it would ask the device itself
    options = {"scale": None, "segments": None, "length": None}
    p = prepare(scheme(text), *inputs(rows), None, **options)  # type: ignore[misc]
    there = replace(p, q=p.q.to(dtype).as_subclass(OnCuda))
    found = [name for name in AUTO if runner._slower(name, there)]
    assert found == passed_over.split()


def test_the_last_one_asked_runs_everything() -> None:
    options = {"scale": None, "segments": None, "length": None, "softcap": 30.0}
    p = prepare(scheme("rope()"), *inputs(), None, **options)  # type: ignore[misc]
    assert [*considered(p)][-1] == ("eager", None)
