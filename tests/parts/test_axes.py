"""Several positions per token: the papers' formulas, every backend, the cache and the modules."""

import math

import pytest
import torch

from longitude import Cache, Dims, Scheme, UserError, attention, dump, parse
from longitude.nn import PositionAttention
from longitude.parts import Mrope

D, HEADS = 16, 4
GRID = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")).flatten(1)
# three words, a 2 × 2 image, two frames of a video of 1 × 2, four words
TIME = [0, 1, 2, 3, 3, 3, 3, 5, 5, 6, 6, 7, 8, 9, 10]
ROW = [0, 1, 2, 3, 3, 4, 4, 5, 5, 5, 5, 7, 8, 9, 10]
COLUMN = [0, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
THW = torch.tensor([TIME, ROW, COLUMN])[:, None]
BACKENDS = ("eager", "native", "flex", "auto")


def scheme(text: str) -> Scheme:
    made = parse(text)
    assert isinstance(made, Scheme) and parse(dump(made)) == made
    return made


def heads(n: int, batch: int = 1, kv: int = HEADS) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(n)
    sizes = (HEADS, kv, kv)
    return [torch.randn(batch, h, n, D, dtype=torch.float64, generator=rng) for h in sizes]


def by_formula(q, k, v, angle, causal: bool, pairs: str, gain: float = 1.0) -> torch.Tensor:
    """softmax(Re Σ_i q_i k_i* e^(i angle_i)) v, angle (h n n pairs) of each pair of tokens."""
    if pairs == "adjacent":
        a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    else:
        a, b = (torch.complex(x[..., : D // 2], x[..., D // 2 :]) for x in (q, k))
    wave = torch.polar(torch.ones_like(angle), angle)
    scores = gain * torch.einsum("bhip,bhjp,hijp->bhij", a, b.conj(), wave).real / D**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def apart(pos: torch.Tensor) -> torch.Tensor:
    """Differences (axes n n) of positions (axes n)."""
    return (pos[:, :, None] - pos[:, None]).double()


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
@pytest.mark.parametrize("spectrum", ["shared", "alternating"])
@pytest.mark.parametrize(("frequencies", "slower"), [("", 1), ("frequencies=linear(2), ", 2)])
def test_axial_is_the_papers_formula(pairs, spectrum, frequencies, slower):
    """First half of the pairs by the first position at 100^(-4t/d), the rest by the second; of
    Pixtral each axis has every second frequency of a plain rotation."""
    q, k, v = heads(GRID.shape[1])
    x, y = apart(GRID)
    t = torch.arange(D // 4, dtype=torch.float64)
    first = second = 100 ** (-4 * t / D)
    if spectrum == "alternating":
        first, second = 100 ** (-4 * t / D), 100 ** (-(4 * t + 2) / D)
    angle = torch.cat([x[..., None] * first, y[..., None] * second], -1) / slower
    want = by_formula(q, k, v, angle.expand(HEADS, -1, -1, -1), False, pairs)
    layout = f"pairs='{pairs}', {frequencies}axes=axial('{spectrum}')"
    one = scheme(f"rope(base=100, {layout}) + bidirectional()")
    for backend in BACKENDS:
        got = attention(one, q, k, v, GRID[:, None], GRID[:, None], backend=backend)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kv", [HEADS, 2])
@pytest.mark.parametrize(("frequencies", "slower"), [("", 1), ("frequencies=linear(2), ", 2)])
def test_mixed_is_the_papers_formula_and_learns(kv, frequencies, slower):
    """Pair t of head h rotates by x f^x_ht + y f^y_ht; f begins along two perpendicular lines."""
    one = scheme(f"rope(base=10, {frequencies}axes=mixed()) + bidirectional()")
    module = PositionAttention(one, Dims(64, HEADS, D), rng=torch.Generator().manual_seed(0))
    weight = module.weights["rope/axes"]
    size = weight.square().sum(0).sqrt()
    usual = 10 ** (-4 * torch.arange(D // 4, dtype=torch.float64) / D)
    torch.testing.assert_close(size.double(), usual.repeat(2).expand_as(size), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        (weight[..., : D // 4] * weight[..., D // 4 :]).sum(0), torch.zeros(HEADS, D // 4)
    )
    q, k, v = heads(GRID.shape[1], kv=kv)
    x, y = apart(GRID)[..., None]
    f = weight.double()[:, :, None, None] / slower
    whole = [t.repeat_interleave(HEADS // kv, 1) for t in (k, v)]
    want = by_formula(q, *whole, x * f[0] + y * f[1], False, "half")
    (grad,) = torch.autograd.grad(want.square().sum(), weight)
    assert float(grad.abs().min()) > 0
    for backend in ("eager", "native"):
        got = module(q, k, v, GRID[:, None], backend=backend)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        (mine,) = torch.autograd.grad(got.square().sum(), weight)
        torch.testing.assert_close(mine, grad, atol=1e-5, rtol=1e-5)


def test_the_axis_of_each_pair_is_the_models():
    """d = 128 of Qwen2-VL and of Qwen3-VL, 64 of Qwen3.5."""
    cases = [
        (Mrope((16, 24, 24)), "t" * 16 + "h" * 24 + "w" * 24),
        (Mrope((24, 20, 20), True), "thw" * 20 + "tttt"),
        (Mrope((11, 11, 10), True), "thw" * 10 + "th"),
    ]
    for axes, letters in cases:
        assert "".join("thw"[axis] for axis in axes.axis_of_pairs()) == letters


@pytest.mark.parametrize(
    ("sections", "axes"),
    [("(2, 3, 3)", "tthhhwww"), ("(4, 2, 2), interleaved=True", "thwthwtt")],
)
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("frequencies", ["unscaled()", "yarn(4, original=8)"])
def test_mrope_is_the_papers_formula(sections, axes, window, frequencies):
    """Pair i rotates by its own position; a remap acts on time, and rows and columns keep their
    offsets; YaRN's frequencies and temperature as without axes."""
    remap = f"rerope({window})" if window else "None"
    one = scheme(f"rope(frequencies={frequencies}, remap={remap}, axes=mrope({sections}))")
    assert one.rotary
    theta = one.rotary.frequencies.inv_freq(D, 10000, 1)
    q, k, v = heads(len(TIME))
    (t, h, w), angles = THW[:, 0], []
    time = (t[:, None] - t).clamp(max=window or 99)
    for pair, axis in enumerate(axes):
        beside = {"t": t, "h": h, "w": w}[axis] - t
        angles.append((time + beside[:, None] - beside) * theta[pair])
    angle = torch.stack(angles, -1).expand(HEADS, -1, -1, -1)
    want = by_formula(q, k, v, angle, True, "half", one.rotary.frequencies.gain(1))
    for backend in BACKENDS:
        if window and backend == "native":
            continue  # it runs remaps over contiguous positions only
        got = attention(one, q, k, v, THW, THW, backend=backend)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["qwen2_vl((2, 3, 3))", "qwen3_vl((4, 2, 2))"])
def test_for_a_text_mrope_is_rope_to_the_bit(text):
    one = scheme(text)
    assert one.rotary
    plain = scheme(f"rope(base={one.rotary.base})")
    q, k, v = heads(12)
    for pos in (range(3, 15), torch.arange(12).expand(3, 1, 12)):
        where = pos if isinstance(pos, range) else pos[0]
        want = attention(plain, q, k, v, where, where)
        assert torch.equal(attention(one, q, k, v, pos, pos), want)


CACHED = {
    "mrope": ("rope(axes=mrope((2, 3, 3)))", THW),
    "leaky": ("rope(remap=leaky_rerope(3, 4), axes=mrope((4, 2, 2), interleaved=True))", THW),
    "axial": ("rope(base=100, axes=axial())", THW[1:]),
    "axial, ordered": ("rope(axes=axial()) + alibi() + window(6)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("sizes", [(5, 4, 6), (15,), (1,) * 15])
@pytest.mark.parametrize("door", ["attend", "update"])
def test_a_cache_keeps_the_rows(name, sizes, door):
    """Prompts in pieces and single tokens equal one call, whichever piece splits an image."""
    text, pos = CACHED[name]
    if pos is None:  # the order of tokens, then their rows and columns
        pos = torch.cat([torch.arange(15)[None, None], THW[1:]])
    one, (q, k, v), cache = scheme(text), heads(15, batch=2, kv=2), Cache(scheme(text))
    want, start = attention(one, q, k, v, pos, pos, backend="eager"), 0
    for size in sizes:
        here = slice(start, start + size)
        new, at = (q[:, :, here], k[:, :, here], v[:, :, here]), pos[..., here]
        start += size
        if door == "attend":
            cache.add(*new[1:], at)
            got = cache.attend(new[0], at)
        else:
            keys, values, k_pos, _ = cache.update(*new[1:], at)
            got = attention(one, new[0], keys, values, at, k_pos)
        torch.testing.assert_close(got, want[:, :, here], atol=1e-6, rtol=1e-6)


def test_a_cache_with_an_image_is_cropped_and_reordered():
    one, (q, k, v) = scheme("rope(axes=mrope((2, 3, 3)))"), heads(15, batch=2)
    want, cache = attention(one, q, k, v, THW, THW), Cache(one)
    cache.add(k[:, :, :9], v[:, :, :9], THW[..., :9])
    cache.crop(6)
    cache.reorder(torch.tensor([1, 0]))
    keys, values, pos, _ = cache.update(k[:, :, 6:].flip(0), v[:, :, 6:].flip(0), THW[..., 6:])
    got = attention(one, q[:, :, 6:].flip(0), keys, values, THW[..., 6:], pos)
    torch.testing.assert_close(got, want[:, :, 6:].flip(0), atol=1e-6, rtol=1e-6)


def test_text_may_follow_an_image_by_one_position():
    one, (q, k, v) = scheme("rope(axes=mrope((2, 3, 3)))"), heads(15)
    want, cache = attention(one, q, k, v, THW, THW), Cache(one)
    cache.add(k[:, :, :3], v[:, :, :3], range(3))
    cache.add(k[:, :, 3:12], v[:, :, 3:12], THW[..., 3:12])
    for at in (12, 13, 14):
        now = range(TIME[at], TIME[at] + 1)
        cache.add(k[:, :, at : at + 1], v[:, :, at : at + 1], now)
        got = cache.attend(q[:, :, at : at + 1], now)
        torch.testing.assert_close(got, want[:, :, at : at + 1], atol=1e-6, rtol=1e-6)


def test_padding_and_batches_of_rows():
    one, (q, k, v) = scheme("rope(remap=rerope(3), axes=mrope((2, 3, 3)))"), heads(15, batch=2)
    short = THW[..., :11]
    pos = torch.stack([THW[:, 0], torch.nn.functional.pad(short[:, 0], (4, 0))], 1)
    padding = torch.zeros(2, 15, dtype=torch.bool)
    padding[1, :4] = True
    got = attention(one, q, k, v, pos, pos, key_padding=padding)
    for row, at, first in ((0, THW, 0), (1, short, 4)):
        own = [x[row : row + 1, :, first:] for x in (q, k, v)]
        want = attention(one, *own, at, at)
        torch.testing.assert_close(got[row : row + 1, :, first:], want, atol=1e-6, rtol=1e-6)


def test_an_image_keeps_its_scores_wherever_it_lies_and_in_any_order():
    one, (q, k, v) = scheme("rope_axial()"), heads(12)
    pos, order = GRID[:, None], torch.randperm(12, generator=torch.Generator().manual_seed(0))
    out = attention(one, q, k, v, pos, pos)
    moved = pos + torch.tensor([7, 30])[:, None, None]
    torch.testing.assert_close(attention(one, q, k, v, moved, moved), out)
    mixed = [x[:, :, order] for x in (q, k, v)]
    torch.testing.assert_close(
        attention(one, *mixed, pos[..., order], pos[..., order]), out[:, :, order]
    )
    some = attention(one, q[:, :, 3:5], k, v, pos[..., 3:5], pos)  # queries need not be the last
    torch.testing.assert_close(some, out[:, :, 3:5])


def test_a_larger_image_is_interpolated_by_the_frequencies():
    """linear(2) sees a grid twice as fine as the trained one; NTK keeps the fastest pair, and turns
    the slowest one half as fast."""
    q, k, v = heads(12)
    pos = GRID[:, None]
    trained = attention("rope(base=100, axes=axial()) + bidirectional()", q, k, v, pos, pos)
    finer = "rope(base=100, frequencies=linear(2), axes=axial()) + bidirectional()"
    torch.testing.assert_close(attention(finer, q, k, v, 2 * pos, 2 * pos), trained)
    ntk, plain = scheme("rope(frequencies=ntk(2), axes=axial())"), scheme("rope(axes=axial())")
    assert ntk.rotary and plain.rotary
    ratio = ntk.rotary.inv_freq(D, 1) / plain.rotary.inv_freq(D, 1)
    assert math.isclose(ratio[0], 1) and math.isclose(ratio[D // 4 - 1], 0.5)
    assert torch.equal(ratio[: D // 4], ratio[D // 4 :])


@pytest.mark.parametrize(
    ("text", "pos", "sentence"),
    [
        ("rope(axes=mrope((2, 3, 4)))", THW, "share out 9 pairs"),
        ("rope(axes=mrope((8,)))", THW, "two axes or more"),
        ("rope(axes=axial(), remap=rerope(4))", THW, "no order of tokens"),
        ("rope(axes=mixed(), frequencies=dynamic_ntk(64))", THW, "no order of tokens"),
        ("rope(axes=axial(), pairs='polar')", THW, "keep one"),
        ("rope(axes=axial(), fraction=0.375)", THW, "4 divides"),
        ("rope(axes=axial())", torch.zeros(5, 1, 15), r"2 positions per token \(2, batch, n\)"),
        ("rope(axes=axial())", range(14), "a position for each of 15 tokens"),
        ("rope(axes=mrope((2, 3, 3)), frequencies=dynamic_ntk(64))", THW, "fixed frequencies"),
        ("rope(axes=mrope((2, 3, 3))) + window(4)", THW, "supports only one: pass text"),
        ("rope(axes=mrope((2, 3, 3))) + logn(64)", THW, "supports only one: pass text"),
        ("rope()", THW, "must hold positions"),
        ("rope(axes=mixed())", THW[1:], r"lack rope\.axes"),
    ],
)
def test_what_can_not_be_is_refused(text, pos, sentence):
    q, k, v = heads(15)
    with pytest.raises(UserError, match=sentence):
        attention(text, q, k, v, pos, pos)


def test_queries_that_are_not_the_last_keys_need_an_order():
    one, (q, k, v) = scheme("rope(axes=mrope((2, 3, 3)))"), heads(15)
    with pytest.raises(UserError, match="an additional first row"):
        attention(one, q[:, :, 4:6], k, v, THW[..., 4:6], THW)
    pos = torch.cat([torch.arange(15)[None, None], THW])
    got = attention(one, q[:, :, 4:6], k, v, pos[..., 4:6], pos)
    want = attention(one, q, k, v, THW, THW)[:, :, 4:6]
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    with pytest.raises(UserError, match="learned head by head"):
        Cache(scheme("rope(axes=mixed())"))
