"""The decoding kernel is attention over keys that it turns itself, whatever it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Cache, Scheme, UserError, attention
from longitude.core.region import SAME
from longitude.ops import decode as decoding
from longitude.ops import plan
from longitude.ops.decode import (
    STEPS,
    DecodePlan,
    Line,
    Run,
    TableSpec,
    make_decode_plan,
    plan_for,
    plan_steps,
    supports,
)
from longitude.ops.kernels.launch import Device, device_of
from tests.cache.test_decode import ROTATED
from tests.grid import scheme
from tests.ops.references import decode_reference

triton = pytest.importorskip("triton")

from longitude.ops.kernels import decode as kernels  # noqa: E402
from longitude.ops.kernels.decode import (  # noqa: E402
    MANY_KEYS,
    ONE_WARP,
    ONE_WARP_KEYS,
    ONE_WARP_QUERIES,
    PROGRAMS,
    Blocks,
    blocks_for,
    decode,
    decode_kernel,
)
from tests.ops.kernels.hopper import Spec, compiled, together  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# groups of 5 do not divide a block, those of 40 are larger; chunks of 9 and 41 wrap inside one
SCHEMES = {
    **ROTATED,
    "wide groups": "rope(remap=self_extend(40, 8), pairs='adjacent')",
    "odd groups": "rope(remap=self_extend(5, 8))",
    "long chunks": "rope(remap=dual_chunk(44, 3))",
    "no positions": "causal()",
}


def drawn(b: int, heads: int, n: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(b, heads, n, d, generator=rng).to(DEVICE, dtype)


def qkv(
    sizes: tuple[int, int, int, int], n: int, d: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Queries, keys and values of (batch, key heads, group, queries) over n tokens."""
    b, kv, group, nq = sizes
    shapes = ((kv * group, nq), (kv, n), (kv, n))
    return [drawn(b, h, m, d, seed, dtype) for seed, (h, m) in enumerate(shapes)]


def seen(
    s: Scheme, d: int, lines: list[Line], at: list[tuple[int, ...]], block: int = 16
) -> DecodePlan:
    found = make_decode_plan(
        s, TableSpec(d, 40, torch.float32, torch.device(DEVICE)), lines, at, block
    )
    assert found is not None
    return found


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max()) if got.numel() else 0.0


def last(n: int, nq: int) -> list[tuple[int, ...]]:
    return [tuple(range(n - nq, n))]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_seen_is_the_scheme(name: str, queries: int) -> None:
    """The reference, which reads the same tensors as the kernel, against float64 by the regions."""
    s, n = scheme(SCHEMES[name]), 123
    assert supports(s)
    q, k, v = (x.double() for x in qkv((2, 2, 2, queries), n, 16))
    now = range(n - queries, n)
    want = attention(s, q, k, v, now, range(n), backend="eager", length=40)
    pairs = s.rotary.pairs if s.rotary else "half"
    got = decode_reference(q, k, v, seen(s, 16, [(Run(0, 0, n),)], last(n, queries)), pairs)
    assert off(got, want) < 5e-7  # tables are float32, and three of them turn a pair


@pytest.mark.parametrize("name", SCHEMES)
def test_steps_planned_at_once_are_those_planned_one_by_one(name: str) -> None:
    """Over a line that ends behind them, which holds keys that come later."""
    s, first = scheme(SCHEMES[name]), 2 * STEPS
    q, k, v = (x.double() for x in qkv((1, 2, 2, 1), first + STEPS, 16))
    spec, pairs = TableSpec(16, 40, torch.float32, k.device), s.rotary.pairs if s.rotary else "half"
    steps = plan_steps(s, spec, ((Run(0, 0, first + STEPS),),), first, 16)
    assert steps is not None
    for n in (0, 1, 7, STEPS - 1):
        own, one = steps.row(n), seen(s, 16, [(Run(0, 0, first + n + 1),)], [(first + n,)])
        assert own.blocks == one.blocks and own.ints.shape[0] == 1
        assert off(*(decode_reference(q, k, v, plan, pairs) for plan in (own, one))) < 1e-12
        later = steps.row((n + 1) % STEPS)
        own.renew(later)  # in memory of its own
        assert torch.equal(own.ints, later.ints)
        assert torch.equal(steps.row(n).ints, steps.ints[n : n + 1])


def test_texts_that_are_continued_in_turns_are_planned_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, made = scheme("rope(remap=leaky_rerope(9, 4))"), []
    monkeypatch.setattr(decoding, "triton_available", lambda device: True)
    monkeypatch.setattr(
        decoding, "make_decode_plan", lambda *args: made.append(args) or make_decode_plan(*args)
    )
    q, k, v = qkv((1, 1, 2, 1), 4 * STEPS, 16)
    for n in range(2 * STEPS, 2 * STEPS + 4):
        for more in (0, 7):  # as many keys, at other positions
            lines = ((Run(0, more, n + 1 - more),),)
            assert plan_for(s, q, k, v, 40, lines, ((n,),)) is not None
    assert len(made) == 2


@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernel_turns_keys_as_every_scheme_says(name: str) -> None:
    s, n, queries = scheme(SCHEMES[name]), 67, 2
    x = qkv((1, 1, 2, queries), n, 16)
    sees = seen(s, 16, [(Run(0, 0, n),)], last(n, queries))
    pairs = s.rotary.pairs if s.rotary else "half"
    assert off(decode(*x, sees, pairs, splits=2), decode_reference(*x, sees, pairs)) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "n", "d", "rotary", "dtype"),
    [
        ((2, 2, 1, 1), 40, 64, 1.0, torch.bfloat16),
        ((1, 1, 8, 2), 33, 80, 1.0, torch.float16),
        ((1, 2, 3, 1), 31, 96, 0.25, torch.bfloat16),
        ((1, 1, 7, 16), 20, 32, 1.0, torch.float32),  # more rows than one program takes
        ((1, 1, 1, 1), 17, 256, 1.0, torch.float32),
        ((1, 1, 4, 1), 1, 128, 0.5, torch.bfloat16),
        ((3, 1, 1, 1), 16, 20, 0.6, torch.float32),
    ],
)
@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_sizes_and_types(sizes: Any, n: int, d: int, rotary: float, dtype: Any, pairs: Any) -> None:
    s = scheme(f"rope(fraction={rotary}, pairs='{pairs}')")
    x = qkv(sizes, n, d, dtype)
    nq = min(sizes[3], n)
    x[0] = x[0][:, :, :nq]
    sees = seen(s, d, [(Run(0, 0, n),)], last(n, nq))
    got = decode(*x, sees, pairs)
    assert got.dtype == dtype
    assert off(got, decode_reference(*(t.double() for t in x), sees, pairs)) < CLOSE[dtype]


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_shares_merge_whatever_their_number(splits: int) -> None:
    """More shares than blocks leave some empty."""
    s, n = scheme("rope(remap=leaky_rerope(8, 4)) + window(40, sinks=3)"), 90
    x, sinks = qkv((1, 1, 2, 1), n, 16), torch.tensor([-1.0, 2.0], device=DEVICE)
    sees = seen(s, 16, [(Run(0, 0, n),)], last(n, 1))
    for logits in (None, sinks):
        want = decode_reference(*x, sees, scale=0.3, sink_logits=logits)
        assert off(decode(*x, sees, scale=0.3, sink_logits=logits, splits=splits), want) < 1e-6


def test_padding_that_only_the_device_knows() -> None:
    s, n = scheme("rope(remap=leaky_rerope(8, 4))"), 40
    x = qkv((2, 1, 2, 1), n, 16)
    sees = seen(s, 16, [(Run(0, 0, n),)], last(n, 1))
    hidden = torch.stack([torch.arange(n) < 5, torch.ones(n, dtype=torch.bool)]).to(DEVICE)
    got = decode(*x, sees, key_padding=hidden, splits=2)
    assert off(got, decode_reference(*x, sees, key_padding=hidden)) < 1e-6
    assert got[0].any() and not got[1].any()


def test_rows_see_their_own_lines() -> None:
    """Padding belongs to no run, and a row without any sees nothing."""
    s, n = scheme("rope(remap=rerope(8))"), 40
    x = qkv((3, 1, 2, 1), n, 16)
    lines: list[Line] = [(Run(0, 0, n),), (Run(3, 0, 10), Run(20, 10, 20)), ()]
    sees = seen(s, 16, lines, [(n - 1,), (29,), (5,)])
    got = decode(*x, sees, splits=2)
    assert off(got, decode_reference(*x, sees)) < 1e-6
    alone = [t[:1] for t in x]
    assert off(got[:1], attention(s, *alone, range(n - 1, n), range(n), backend="eager")) < 1e-6
    columns = [*range(3, 13), *range(20, 40)]
    q, k, v = (t[1:2] for t in x)
    k, v = (t[:, :, columns] for t in (k, v))
    assert off(got[1:2], attention(s, q, k, v, range(29, 30), range(30), backend="eager")) < 1e-6
    assert not got[2].any()


@pytest.mark.parametrize("layout", ["tokens first", "cut out", "dimensions first"])
def test_keys_are_read_where_they_lie(layout: str) -> None:
    s, n = scheme("rope()"), 37
    q, k, v = qkv((2, 2, 2, 1), n, 16)
    if layout == "tokens first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "cut out":  # as a cache's room
        k, v = (torch.cat([t, t, t], 2)[:, :, n : 2 * n] for t in (k, v))
    else:
        q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    sees = seen(s, 16, [(Run(0, 0, n),)], last(n, 1))
    assert off(decode(q, k, v, sees), decode_reference(q, k, v, sees)) < 1e-6


@pytest.mark.parametrize("name", ["rope", "leaky", "self-extend", "dual chunk"])
def test_positions_to_ten_million_stay_exact(name: str) -> None:
    s, n, start = scheme(SCHEMES[name]), 64, 9_999_360  # a multiple of every group and chunk
    x = qkv((1, 1, 1, 1), n, 16)
    pairs = s.rotary.pairs if s.rotary else "half"
    places = (start + n - 1,)
    want = attention(s, *(t.double() for t in x), range(places[0], places[0] + 1),
                     range(start, start + n), backend="eager")  # fmt: skip
    assert off(decode(*x, seen(s, 16, [(Run(0, start, n),)], [places]), pairs), want) < 1e-6
    whole = [(Run(0, 0, 1), Run(1, start + 1, n - 1))]  # and one key ten million before
    got = decode(*x, seen(s, 16, whole, [places]), pairs)
    where = torch.tensor([0, *range(start + 1, start + n)], device=DEVICE)
    now = torch.tensor(places, device=DEVICE)
    want = attention(s, *(t.double() for t in x), now, where, backend="eager")
    assert off(got, want) < 1e-6


def test_keys_turned_already_are_taken_as_they_are() -> None:
    s, n = scheme("rope()"), 40
    q, k, v = qkv((1, 1, 2, 1), n, 16)
    cache = Cache(s)
    cache.add(k, v, range(n))
    cache.keys.rotate_all(s.rotary.regions()[0])  # type: ignore[union-attr]
    lines = cache.keys.lines
    assert lines is not None and lines[0][0].frame is not None
    sees = seen(s, 16, lines, last(n, 1))
    assert not sees.rotates
    want = attention(s, q, k, v, range(n - 1, n), range(n), backend="eager")
    assert off(decode(q, cache.keys.buffer.view(), v, sees), want) < 1e-6
    other = scheme("rope(remap=leaky_rerope(8, 4))")  # a far key turned as near ones are
    assert (
        make_decode_plan(other, TableSpec(16, 1, torch.float32, k.device), lines, last(n, 1), 16)
        is None
    )


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel chosen on a CPU too, as on a GPU; how many queries each run of it had."""
    ran: list[int] = []
    run = decoding.run_kernel

    def counted(s: Scheme, q: Tensor, *rest: Any) -> Tensor:
        ran.append(q.shape[2])
        return run(s, q, *rest)

    monkeypatch.setattr(decoding, "triton_available", lambda x: True)
    monkeypatch.setattr(plan, "device_of", lambda x: Device(x.type, triton=True))
    monkeypatch.setattr(decoding, "run_kernel", counted)
    return ran


@pytest.mark.parametrize("name", ["self-extend", "stepped leaky", "scaled", "window"])
@torch.no_grad()
def test_attention_takes_the_kernel_for_a_few_queries(name: str, everywhere: list[int]) -> None:
    s, n = scheme(ROTATED[name]), 50
    x = qkv((1, 1, 2, 2), n, 16)
    now = range(n - 2, n)
    want = attention(s, *x, now, range(n), backend="eager")
    assert off(attention(s, *x, now, range(n)), want) < 1e-6
    assert everywhere == [2]
    hidden = torch.arange(n, device=DEVICE)[None] % 3 == 1
    want = attention(s, *x, now, range(n), backend="eager", key_padding=hidden)
    assert off(attention(s, *x, now, range(n), key_padding=hidden), want) < 1e-6
    assert everywhere == [2, 2]
    one = (x[0][:, :, :1], *x[1:], torch.tensor([n - 2], device=DEVICE), range(n))
    assert off(attention(s, *one, key_padding=hidden), want[:, :, :1]) < 1e-6
    assert everywhere == [2, 2], "where a place is known to the device alone, keys turn before"


@pytest.mark.parametrize("text", [
    *(ROTATED[name] for name in ("rope", "leaky", "streaming", "by length", "scaled")),
    "rope(fraction=0.5) + logn(16)",  # dimensions without rotation: no table has its factors
])  # fmt: skip
@torch.no_grad()
def test_a_cache_decodes_by_the_kernel_and_keeps_its_keys(text: str, everywhere: list[int]) -> None:
    """A prompt, tokens one by one, candidates that are taken back; two rows, one padded."""
    s, n, pads = scheme(text), 30, (0, 5)
    pos = torch.stack([(torch.arange(n) - pad).clamp(min=0) for pad in pads]).to(DEVICE)
    padding = torch.stack([torch.arange(n) < pad for pad in pads]).to(DEVICE)
    q, k, v = (drawn(2, h, n, 16, h, torch.float32) for h in (4, 2, 1))
    k = k[:, :1]
    cache, outs = Cache(s, length=40, slack=6), []
    for a, b, stays in [(0, 24, 24), (24, 25, 25), (25, 28, 26), (26, 30, 30)]:
        cache.add(k[:, :, a:b], v[:, :, a:b], pos[:, a:b], padding[:, a:b])
        outs.append(cache.attend(q[:, :, a:b], pos[:, a:b])[:, :, : stays - a])
        cache.crop(stays)
    assert everywhere == [1, 3, 4]
    got = torch.cat(outs, 2)
    for r, pad in enumerate(pads):
        own = [t[r : r + 1, :, pad:] for t in (q, k, v)]
        want = attention(s, *own, range(n - pad), range(n - pad), backend="eager", length=40)
        assert off(got[r : r + 1, :, pad:], want) < 2e-6
    assert not cache.keys.any_rotated()


def test_gradients_go_another_way(everywhere: list[int]) -> None:
    x = [t.requires_grad_() for t in qkv((1, 1, 1, 1), 20, 16)]
    attention(scheme("rope()"), *x, range(19, 20), range(20)).sum().backward()
    assert not everywhere and all(t.grad is not None for t in x)


def test_a_known_shape_goes_straight_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiled is launched again with the same arguments, in the kernel's own order."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    class Fake:
        def __init__(self, kernel: Any) -> None:
            self.arg_names, self.fn = kernel.arg_names, object()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **options: Any) -> Any:
                given = [*args, *(options[n] for n in self.arg_names if n in options)]
                assert len(given) == len(self.arg_names)
                calls.append(("found" if options else "known", tuple(given)))
                return self

            return launch

    for name in ("decode_kernel", "merge_shares_kernel"):
        monkeypatch.setattr(kernels, name, Fake(getattr(kernels, name)))
    s, n = scheme("rope(remap=rerope(8))"), 67
    x = qkv((1, 1, 2, 1), n, 48)
    sees = seen(s, 48, [(Run(0, 0, n),)], last(n, 1))
    decode(*x, sees, splits=3)
    longer = seen(s, 48, [(Run(0, 0, n - 1),)], last(n - 1, 1))
    decode(*x, longer, splits=2)
    assert [how for how, _ in calls] == ["found", "found", "known", "known"]
    (_, first), _, (_, second), _ = calls
    told = dict(zip(decode_kernel.arg_names, second, strict=True))
    assert (
        told["splits"] == 2 and told["segments"] == 2 and told["k_n"] == 48 and told["HALF"] == 24
    )
    told_first = dict(zip(decode_kernel.arg_names, first, strict=True))
    numbers = [name for name, x in told.items() if not isinstance(x, Tensor)]
    assert [name for name in numbers if told[name] != told_first[name]] == ["splits", "least"]


def test_nothing_to_see() -> None:
    s = scheme("rope()")
    q, k, v = qkv((2, 1, 2, 1), 0, 16)
    assert not decode(q, k, v, seen(s, 16, [()], [(0,)])).any()
    none = q[:, :, :0]
    assert decode(none, k, v, seen(s, 16, [()], [()])).shape == none.shape


def test_mistakes_get_a_sentence() -> None:
    s = scheme("rope()")
    q, k, v = qkv((1, 1, 1, 1), 8, 16)
    sees = seen(s, 16, [(Run(0, 0, 8),)], last(8, 1))
    with pytest.raises(UserError, match="the plan is for 1 queries, not 2"):
        decode(torch.cat([q, q], 2), k, v, sees)
    with pytest.raises(UserError, match="does not support"):
        decode(q.double(), k.double(), v.double(), sees)
    with pytest.raises(UserError, match="up to 256"):
        decode(*(torch.nn.functional.pad(x, (0, 272)) for x in (q, k, v)), sees)


def test_a_plan_becomes_a_later_one_in_place() -> None:
    s, n = scheme("rope(remap=leaky_rerope(8, 4))"), 60
    x = qkv((1, 1, 2, 1), n, 16)
    held = seen(s, 16, [(Run(0, 0, 41),)], last(41, 1))
    memory = held.ints.data_ptr()
    held.renew(seen(s, 16, [(Run(0, 0, n),)], last(n, 1)))
    want = attention(s, *x, range(n - 1, n), range(n), backend="eager")
    assert held.ints.data_ptr() == memory
    assert off(decode(*x, held, splits=2), want) < 1e-6
    for other in ([(Run(0, 0, 4),)], [(Run(0, 0, 2000),)]):  # one piece less, more blocks
        with pytest.raises(UserError, match="capture the graph anew"):
            held.renew(seen(s, 16, other, last(other[0][0].n, 1)))


def test_schemes_that_do_not_fit() -> None:
    for text in ("alibi()", "rope(decay=xpos())", "rope(remap=streaming(2, 8)) + bidirectional()"):
        assert not supports(scheme(text))
    assert all(r.k == SAME for r in scheme("rope()").rotary.regions())  # type: ignore[union-attr]
    far = [(Run(0, 2**30, 8),)]
    head = TableSpec(16, 1, torch.float32, torch.device(DEVICE))
    assert make_decode_plan(scheme("rope()"), head, far, [(2**30 + 8,)], 16) is None


def shares(
    dtype: str, d: int, half: int, adjacent: bool, rows: int = 16, page: int = 0, keys: int = 0,
    one_warp: bool = False,
) -> Spec:  # fmt: skip
    """The kernel as `decode` launches it over heads of d, with all strides multiples of 16."""
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    blocks = blocks_for(d, kind, rows, keys, one_warp)
    pointers = {"q": dtype, "k": dtype, "v": dtype, "out": "fp32", "ints": "i32"}
    floats = ("floats", "cos", "sin", "start_cos", "start_sin")
    strides = [*(f"{x}_{axis}" for x in "qkv" for axis in "bhn"), "hidden_b", "table_b"]
    counts = ("kv_heads", "group", "tiles", "queries", "segments", "splits", "least", "total_rows")
    types = {
        **{name: f"*{one}" for name, one in (pointers | dict.fromkeys(floats, "fp32")).items()},
        "hidden": "*u8", "table": "*i32", "capacity": "i32", **dict.fromkeys(strides, "i32"),
        "plan_row": "i32", "scale": "fp32", **dict.fromkeys(counts, "i32"),
    }  # fmt: skip
    constants = {
        "HALF": half, "HALF_PAD": padded(half), "REST": d - 2 * half,
        "REST_PAD": padded(d - 2 * half), "DV": d, "DV_PAD": padded(d), "R": rows,
        "N": blocks.keys, "ADJACENT": adjacent, "ROTATES": True, "ALONE": rows == 16,
        "HIDES": rows > 16, "PAGE": page, "GROUP": page or 1,
        "K_PAGE": page * 1024, "V_PAGE": page * 1024, "WIDE": False, "ONCE": False,
    }  # fmt: skip
    divided = [*pointers, *floats, *strides]
    aligned = tuple((n,) for n, name in enumerate(types) if name in divided)
    kernel = "longitude.ops.kernels.decode:decode_kernel"
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    if one_warp:
        kernel = "longitude.ops.kernels.decode_hopper:decode_hopper_kernel"
        own = ("HALF", "DV", "R", "N", "ROTATES", "PAGE", "K_PAGE", "V_PAGE", "ONCE")
        constants = {name: constants[name] for name in own} | {"R": ONE_WARP_QUERIES}
    return Spec(kernel, types, constants, aligned, options)


def padded(n: int) -> int:
    return max(16, 1 << max(n - 1, 0).bit_length())


USUAL = together(
    [
        shares("bf16", 128, 64, False),
        shares("bf16", 128, 64, False, page=16),
        shares("bf16", 128, 64, False, page=16, keys=MANY_KEYS),
        shares("bf16", 128, 64, False, page=16, keys=MANY_KEYS, one_warp=True),
    ]
)
OTHERS = [
    shares("bf16", 128, 64, True),
    shares("bf16", 64, 32, False),
    shares("bf16", 80, 20, True),
    shares("bf16", 256, 128, False),
    shares("bf16", 128, 64, False, 64),
    shares("fp32", 128, 64, False),
    shares("fp16", 64, 32, False, keys=MANY_KEYS, one_warp=True),
]


@pytest.mark.parametrize("specs", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_the_kernel_compiles_for_hopper(specs: list[Spec]) -> None:
    for spec, made in zip(specs, compiled(specs), strict=True):
        programs = PROGRAMS[spec.options["num_warps"]]
        assert made["shared"] * programs <= 220 * 1024, "several share a multiprocessor"
        assert "cp.async.cg.shared.global" in made["ptx"], "keys are on their way while others turn"
        assert ".local" not in made["ptx"]
        products = "mma.sync" in made["ptx"] or "wgmma.mma_async" in made["ptx"]
        assert products == ("*fp32" != spec.types["k"])


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1000, 32768, 131_072])
@pytest.mark.parametrize(
    "text",
    [
        "rope()",
        "rope(pairs='adjacent', fraction=0.5)",
        "rope(remap=leaky_rerope(4096, 8))",
        "rope(remap=self_extend(7, 1024))",
        "rope(remap=dual_chunk(3072, 511))",
        "rope(remap=rerope(1024)) + window(4096, sinks=4)",
    ],
)
@torch.no_grad()
def test_at_length(text: str, n: int, dtype: torch.dtype) -> None:
    """One token and a few of them, against float64: as near as the type lets turned keys be."""
    least = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}[dtype]
    s = scheme(text)
    for queries, d in ((1, 128), (5, 64)):
        x = qkv((4, 2, 4, queries), n, d, dtype)  # at the greatest length, many keys
        now, wide = range(n - queries, n), [t.double() for t in x]
        want = attention(s, *wide, now, range(n), backend="eager")
        assert decoding.unsupported_reason(s, *x) is None
        got = attention(s, *x, now, range(n))
        assert float((got.double() - want).norm() / want.norm()) < least


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "decode_hopper_kernel"),
        ({"d": 64, "dtype": torch.float16, "group": 8}, "decode_hopper_kernel"),
        ({"page": 16}, "decode_hopper_kernel"),
        ({"page": 8}, "decode_kernel"),  # a block of keys would lie in two pages
        ({"text": "rope(remap=self_extend(5, 9))", "page": 16}, "decode_kernel"),  # or three
        ({"text": "rope(remap=self_extend(5, 9))"}, "decode_hopper_kernel"),
        ({"text": "rope(pairs='adjacent')"}, "decode_kernel"),
        ({"text": "rope(fraction=0.5)"}, "decode_kernel"),
        ({"d": 96}, "decode_kernel"),
        ({"group": 9}, "decode_kernel"),
        ({"nq": 2}, "decode_kernel"),
        ({"dtype": torch.float32}, "decode_kernel"),
        ({"hidden": True}, "decode_kernel"),
        ({"odd": True}, "decode_kernel"),  # copies of 16 bytes
        ({"begins": 1}, "decode_kernel"),
        ({"blocks": Blocks(16, 4, 2)}, "decode_kernel"),
        ({"blocks": ONE_WARP}, "decode_hopper_kernel"),
        ({"keys": 32}, "decode_kernel"),
    ],
    ids=str,
)
def test_what_single_warps_take(
    change: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    usual = {"text": "rope()", "d": 128, "group": 4, "nq": 1, "dtype": torch.bfloat16, "page": 0}
    c = SimpleNamespace(**{**usual, "hidden": False, "odd": False, "keys": 16, "begins": 0,
                           "blocks": None, **change})  # fmt: skip
    s, n, launched = scheme(c.text), 64, []
    monkeypatch.setattr(kernels, "device_of", lambda x: Device(x.type, triton=True, hopper=True))
    monkeypatch.setattr(kernels, "launch", lambda one, *_, **__: launched.append(one.fn.__name__))
    kernels._layout.cache_clear()
    q, k, v = qkv((1, 2, c.group, c.nq), n, c.d + c.odd, c.dtype)
    q, k, v = (x[..., : c.d] for x in (q, k, v))
    if c.begins:  # in the middle of 16 bytes
        k = torch.cat([k.new_zeros(c.begins), k.flatten()])[c.begins :].view(k.shape)
    sees = make_decode_plan(
        s, TableSpec(c.d, n, torch.float32, q.device), [(Run(0, 0, n),)], last(n, c.nq), c.keys
    )
    assert sees is not None
    table = torch.arange(n // c.page, dtype=torch.int32)[None] if c.page else None
    if c.page:
        k, v = (x.reshape(2, -1, c.page, c.d).transpose(0, 1) for x in (k, v))
    hidden = torch.zeros(1, n, dtype=torch.bool) if c.hidden else None
    pairs = s.rotary.pairs if s.rotary else "half"
    decode(q, k, v, sees, pairs, key_padding=hidden, block_table=table, blocks=c.blocks)
    assert launched[0] == kernel
    kernels._layout.cache_clear()


@torch.no_grad()
def test_many_keys_are_planned_for_single_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "triton_available", lambda device: True)
    s, (q, k, v) = scheme("rope()"), qkv((1, 2, 4, 1), 1, 128, torch.bfloat16)
    for hopper, n, keys in (
        (True, ONE_WARP_KEYS // 2, 16), (True, ONE_WARP_KEYS // 2 - 1, 64),
        (False, ONE_WARP_KEYS, 32),
    ):  # fmt: skip
        device = Device("cpu", triton=True, hopper=hopper)
        monkeypatch.setattr(kernels, "device_of", lambda x, device=device: device)
        found = plan_for(s, q, k, v, 40, ((Run(0, 0, n),),), ((n - 1,),))
        assert found is not None and found.steps[0].shape[1] == keys


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels that were launched, where a plan for blocks of 16 keys means single warps."""
    if not device_of(torch.device(DEVICE)).hopper:
        pytest.skip("needs a Hopper GPU, and Triton with a Gluon that was tried")
    ran: list[Any] = []
    run = kernels.launch

    def counted(kernel: Any, *rest: Any, **options: Any) -> None:
        ran.append(kernel.fn.__name__)
        run(kernel, *rest, **options)

    monkeypatch.setattr(kernels, "launch", counted)
    return ran


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "no positions"])
def test_single_warps_read_as_the_reference_does(
    name: str, d: int, dtype: torch.dtype, single: list[Any]
) -> None:
    """Rows of several lines, shares of any number, sinks, groups of 1, 3 and 8 heads."""
    s, n = scheme(SCHEMES[name]), 333
    pairs = s.rotary.pairs if s.rotary else "half"
    for group, splits in ((1, 1), (3, 2), (8, 7)):
        x = qkv((3, 2, group, 1), n, d, dtype)
        lines: list[Line] = [(Run(0, 0, n),), (Run(5, 0, 100), Run(111, 100, 97)), ()]
        sees = seen(s, d, lines, [(n - 1,), (196,), (5,)])
        sinks = torch.randn(2 * group, device=DEVICE) if splits == 2 else None
        wide = [t.double() for t in x]
        want = decode_reference(*wide, sees, pairs, sink_logits=sinks)
        got = decode(*x, sees, pairs, sink_logits=sinks, splits=splits)
        assert off(got, want) < CLOSE[dtype] and not got[2].any()
    assert ("decode_hopper_kernel" in single) == (pairs == "half")


@pytest.mark.accelerator
def test_single_warps_leave_other_calls_alone(single: list[Any]) -> None:
    s, n = scheme("rope()"), 100
    odd = torch.randn(1, 2, n, 129, device=DEVICE, dtype=torch.bfloat16)[..., :128]
    hidden = torch.arange(n, device=DEVICE)[None] < 5
    for sizes, options, keys in (
        ((1, 2, 2, 2), {}, None), ((1, 2, 9, 1), {}, None),
        ((1, 2, 2, 1), {"key_padding": hidden}, None), ((1, 2, 2, 1), {}, odd),
    ):  # fmt: skip
        q, k, v = qkv(sizes, n, 128, torch.bfloat16)
        k = k if keys is None else keys
        sees = seen(s, 128, [(Run(0, 0, n),)], last(n, sizes[3]))
        want = decode_reference(*(t.double() for t in (q, k, v)), sees, **options)
        assert off(decode(q, k, v, sees, **options), want) < CLOSE[torch.bfloat16]
    assert "decode_hopper_kernel" not in single


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_captured_graph_reads_a_later_step_from_its_plan() -> None:
    s, n, d = scheme("rope(remap=leaky_rerope(512, 8))"), 4096, 128
    q, k, v = qkv((2, 2, 4, 1), n, d, torch.bfloat16)
    head = TableSpec(d, 1, torch.float32, q.device)
    block = blocks_for(d, q.dtype).keys

    def at(place: int) -> DecodePlan:
        found = make_decode_plan(s, head, [(Run(0, 0, place + 1),)], [(place,)], block)
        assert found is not None
        return found

    held = at(3000)
    decode(q, k, v, held)  # compiled outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, k, v, held)
    for place in (3000, 3001, 4000):
        held.renew(at(place))
        graph.replay()
        seen = (q, k[:, :, : place + 1], v[:, :, : place + 1])
        want = attention(s, *seen, range(place, place + 1), range(place + 1), backend="eager")
        assert off(out, want) < 2e-2
