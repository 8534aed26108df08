"""The written form: what it keeps, what it refuses, and in what words."""

import dataclasses
import functools
import random
import re
import typing
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longitude import Layers, Scheme, Split, UserError, dump, parse
from longitude.core.part import PARTS
from longitude.presets import PRESETS

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

INSIDE = ("frequencies", "remap", "decay", "axes")  # parts that live inside rope(…)
many = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

sizes = st.integers(1, 40) | st.integers(1, 10**9)
numbers = st.floats(1e-6, 1e18) | sizes | st.sampled_from([0.1, 1e16, 1e-99, 123456789.125])
signed = numbers | numbers.map(lambda x: -x) | st.just(0)
share = st.floats(0.01, 0.49)
FIELDS = {  # where not every positive number will do
    **dict.fromkeys(["alpha", "fraction", "share", "slow", "low"], share),
    **dict.fromkeys(["fast", "high", "base"], st.integers(2, 10**6) | st.floats(1.5, 1e9)),
    **dict.fromkeys(["power", "start", "scale_by", "mscale", "attention_factor"], signed),
    "step": st.floats(1, 8) | st.integers(1, 8),
    "dim": st.integers(1, 99).map(lambda x: 2 * x),
    "buckets": st.sampled_from([8, 16, 32]),
    "max_distance": st.integers(20, 999),
    "span": st.integers(40, 999),
    "original": st.integers(2, 10**6),
    "train": st.integers(2, 10**6),
}


def rope_fields(f: dict[str, Any]) -> dict[str, Any]:
    """Polar pairs take whole heads and one position; axes of images have no order of tokens."""
    polar, axes = f.get("pairs") == "polar", f.get("axes")
    gone = {"axes", "fraction"} if polar else set()
    if axes is not None and not axes.temporal:
        gone |= {"remap", "decay", "frequencies"}
    return {name: value for name, value in f.items() if name not in gone}


READ_HEADS = {"deberta", "shaw", "transformer_xl"}  # polar pairs refuse them
TOGETHER = {  # fields that must fit each other
    "dual_chunk": lambda f: {**f, "size": f["size"] + 2 * f["local"]},
    "equal_mean": lambda f: {**f, "max": 2 * f["mean"]},
    "rope": rope_fields,
    "mrope": lambda f: {**f, "sections": 2 * f["sections"]},
    "forget": lambda f: {**f, "shortest": 3, "longest": 3 + f.get("longest", 4)},
    "adagrope": lambda f: {**f, "positions": 1000 + f["positions"]},
    "group_attention": lambda f: {
        "group": 1 + f["group"] % 999,
        "window": (1 + f["group"] % 999) * (1 + f["window"] % 999),
    },
    "resonance": lambda f: {},
    "lampe": lambda f: {**f, "step": 64},
    "power_basis": lambda f: {name: 1 + abs(value) for name, value in f.items()},
    "string": lambda f: {**f, "shift": f["shift"] + f.get("local", 128)},
    "longrope": lambda f: {**f, "long": tuple(2 * x for x in f["short"])},
}


def values(hint: Any) -> st.SearchStrategy:
    """Values of a declared type, parts included."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), min_size=1, max_size=4).map(tuple)
    if args:  # a union
        return st.one_of(*map(values, args))
    plain = {int: sizes, float: numbers, bool: st.booleans(), type(None): st.none()}
    return plain[hint] if hint in plain else at_site(hint.__name__.lower())


@functools.cache
def at_site(site: str) -> st.SearchStrategy:
    return st.sampled_from([n for n, p in PARTS.items() if p.site == site]).flatmap(a_part)


@st.composite
def a_part(draw, name: str) -> Any:
    """A part of this name: random fields, and its defaults where they may stay."""
    cls, hints = PARTS[name], typing.get_type_hints(PARTS[name])
    fields = {
        f.name: draw(FIELDS.get(f.name, values(hints[f.name])))
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING or draw(st.booleans())
    }
    return cls(**TOGETHER.get(name, dict)(fields))


@st.composite
def a_scheme(draw, shared: tuple = ()) -> Scheme:
    """A scheme of random parts at every site, in any order."""
    parts = [*shared, *draw(st.lists(a_part("rope"), max_size=1))]
    for site in ("bias", "scale"):
        parts += draw(st.lists(at_site(site), max_size=2, unique_by=lambda p: p.name))
    if any(getattr(p, "pairs", None) == "polar" for p in parts):
        parts = [p for p in parts if p.name not in READ_HEADS]
    masks = draw(st.lists(at_site("mask"), max_size=3, unique_by=lambda p: p.name))
    both = {"causal", "bidirectional"} <= {m.name for m in masks}
    decays = any(getattr(p, "decay", None) for p in parts)  # only a causal scheme may
    parts += [m for m in masks if not (m.name == "bidirectional" and (both or decays))]
    return Scheme.of(*draw(st.permutations(parts)))


@st.composite
def a_scheme_or_layers(draw) -> Scheme | Layers:
    shared = tuple(draw(at_site(s)) for s in ("positions", "embed") if draw(st.booleans()))
    some = draw(st.lists(a_scheme(shared), min_size=1, max_size=3))
    if len(some) == 2 and draw(st.booleans()):
        return Split(tuple(some), draw(st.floats(0.01, 0.99)))
    return some[0] if draw(st.booleans()) else Layers(tuple(some))


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_reads_back(name):
    @many
    @given(a_part(name))
    def check(part):
        scheme = Scheme.of(PARTS["rope"](**{part.site: part}) if part.site in INSIDE else part)
        again = parse(dump(scheme))
        assert again == scheme and hash(again) == hash(scheme)
        held = [*again.parts, *(getattr(again.rotary, site, None) for site in INSIDE)]
        assert part in held or part in (PARTS["sequential"](), PARTS["causal"]())

    check()


@settings(many, max_examples=60)
@given(a_scheme_or_layers())
def test_schemes_and_layers_read_back(scheme):
    text = dump(scheme)
    assert parse(text) == scheme
    assert dump(parse(text)) == text and "\n" not in text


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_written_like_parts(name):
    make = PRESETS[name]
    args = ((1.0, 2.0), (3.0, 4.0)) if name == "longrope_phi3" else ()
    scheme = make(*args)
    assert parse(dump(scheme)) == scheme
    assert parse(f"{name}{args or '()'}") == scheme


def test_the_written_form_itself():
    text = (
        "rope(base=100000, frequencies=yarn(4, original=8192)) + logn(8192) + window(1020, sinks=4)"
    )
    assert dump(parse(text)) == text
    assert dump(parse(" window( 1020,sinks=4)+logn(train=8192) + rope(1e5,frequencies=yarn("
                      "factor=4.0, original=8_192))")) == text  # fmt: skip
    assert dump(parse("rope + causal")) == dump(parse("rope()")) == "rope()"
    assert dump(parse("causal()")) == "causal()" and parse("nope()") == Scheme()
    assert dump(parse("layers(rope() + window(16), logn(512))")) == (
        "layers(rope() + window(16), logn(512))"
    )
    assert parse("streaming_llm(4, 1020) + logn(512)").scale == parse("logn(512)").scale


def test_short_forms_of_a_rotation_are_read_where_asked_for():
    for text, full in (
        ("rerope(128)", "rope(remap=rerope(128))"),
        ("yarn(8, original=256) + logn(64)", "rope(frequencies=yarn(8, original=256)) + logn(64)"),
        ("rope(base=500)", "rope(base=500)"),
        ("split(streaming(4, 28), rerope(16))", "split(streaming(4, 28), rerope(16))"),
    ):
        assert parse(text, short_form=True) == parse(full)


def test_a_split_is_written_by_what_its_layers_change():
    text = "split(streaming(4, 4092), rerope(1024) + logn(8192), share=0.5)"
    split = parse(text)
    assert dump(split) == text
    assert split == parse(
        "split(far=rope(remap=rerope(1024)) + logn(8192), near=streaming(4, 4092))"
    )
    assert split.schemes == parse("layers(streaming(4, 4092), rerope(1024) + logn(8192))").schemes
    for written in (
        "split(rope(base=500000, remap=streaming(4, 60)), rope(), share=0.25)",
        "split(window(16), causal(), share=0.3333)",
        "split(yarn(4, original=64) + rerope(16), rope(remap=rerope(9)) + logn(8))",
    ):
        assert parse(dump(parse(written))) == parse(written)
    assert dump(parse(written)) == (
        "split(yarn(4, original=64) + rerope(16), rerope(9) + logn(8), share=0.5)"
    )


def one_sentence(message: str) -> bool:
    return (
        "\n" not in message and message.endswith(".") and 0 < len(message) < 400
        and message.isprintable()
    )  # fmt: skip


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert one_sentence(str(caught.value)), str(caught.value)
    return str(caught.value)


SEEDS = [
    "rope(base=100000, frequencies=yarn(4, original=8192), remap=leaky_rerope(4096, 8)) + "
    "logn(8192)",
    "layers(rope() + window(16), logn(512), causal())",
    "split(streaming(4, 60) + logn(64), far=rerope(16), share=0.4)",
    "t5(bidirectional=True) + bidirectional()",
    "rope(decay=xpos()) + kerple_log + ssmax(0.5)",
    "rope(frequencies=longrope((1, 2.5), (3, 4), original=64, factor=8))",
    "learned(512, offset=2) + shaw(16, values=True) + fire()",
    "streaming_llm(4, 1020)",
]
BITS = [
    *("__import__('os').system('true')", "lambda: 0", "lambda x: x", "f'{1}'", "f'{__name__}'"),
    *("exec('1')", "().__class__", "rope(**{'base': 2})", "rope(*[1])", "window(10**9)", "print"),
    *("1 if 1 else 2", "{k: 1 for k in ()}", "rope.base", "rope[0]", "rope(base='x')"),
    *(
        "[]",
        "{}",
        "()",
        "(1,)",
        "[1, 2]",
        "1j",
        "b'x'",
        "...",
        "None",
        "True",
        "-1",
        "--1",
        "-True",
    ),
    *(
        "1e400",
        "-1e999",
        "nan",
        "inf",
        "0x" + "f" * 5000,
        "9" * 5000,
        "9" * 400,
        "1e-400",
        "5e-324",
    ),
    *("'", '"', "'''", "#", ";", ":=", "=", "==", "*", "**", "*a", "**{}", "%", "@", "\\", "if"),
    *(
        "else",
        "for",
        "await",
        "yield",
        "original=",
        "base=1, base=2",
        "x" * 3000,
        f"'{'a' * 3000}'",
    ),
    *("rope", "rope()", "rope(rope())", "layers()", "layers(rope())", "+rope()" * 50),
    *("rope(" * 60, ")" * 60, "(" * 300, "-" * 3000, "\x00", "\n", "\t", "\r", "\x0c", "\x1b[31m"),
    *(
        "π",
        "𝛑",
        "ﬁ",
        "é",
        "\ud800",
        "\u202e",
        "\u2028",
        "\N{GREEK SMALL LETTER PI}",
        "\U0010ffff" * 80,
    ),
]
PLACES = [
    *("{}", "rope() + {}", "rope({})", "window({})", "layers({})", "rope(remap={})"),
    "longrope(({},), (1,), original=9)",
]


def mutated(rng: random.Random) -> str:
    """A valid text with a few cuts, swaps and insertions, or nothing but bits."""
    text = rng.choice(SEEDS) if rng.random() < 0.9 else ""
    if rng.random() < 0.3:  # another number, which may be as good
        return re.sub(r"\d+", lambda m: rng.choice([m[0], "7", "0", "2.5", "-3", "1e9"]), text)
    for _ in range(rng.randint(1, 5)):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:a] + rng.choice(BITS) + text[a:]
        elif kind == 2:
            text = text[:a] + chr(rng.randrange(0x110000)) + text[a:]
        elif kind == 3:
            text = (
                text[:a] + "".join(rng.choices("()[]{},=+-*/.'\"#:;<>!~ \t\n09aeο", k=3)) + text[a:]
            )
        elif kind == 4:
            text = text[:b] + text[a:b] + text[b:]
        else:
            text = text[:a] + rng.choice(sorted(PARTS) + sorted(PRESETS)) + "(" + text[a:]
    return text


def test_thousands_of_strings_parse_or_say_one_sentence():
    rng, read = random.Random(0), 0
    for _ in range(3_000):
        text = mutated(rng)
        try:
            scheme = parse(text)
        except UserError as mistake:
            assert one_sentence(str(mistake)), (text[:200], str(mistake))
        else:
            read += 1
            assert parse(dump(scheme)) == scheme
    assert 60 < read < 2_900


@pytest.mark.parametrize("place", PLACES)
def test_bits_in_every_place(place):
    for bit in BITS:
        try:
            scheme = parse(place.replace("{}", bit))
        except UserError as mistake:
            assert one_sentence(str(mistake)), str(mistake)
        else:
            assert parse(dump(scheme)) == scheme


def test_nothing_is_evaluated(tmp_path):
    target = tmp_path / "made"
    for call in (
        f"open({str(target)!r}, 'w')",
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[open({str(target)!r}, 'w') for _ in (1,)]",
        f"(lambda: open({str(target)!r}, 'w'))()",
        f"f'{{open({str(target)!r}, \"w\")}}'",
        f"exec(\"open({str(target)!r}, 'w')\")",
    ):
        for text in (call, f"rope(base={call})", f"rope() + {call}", f"layers({call})"):
            refused(text)
    assert not target.exists()


NAMED = [
    ("rope() + rope(base=500)", r"one rotation.*rope\(\) and rope\(base=500\).*layers"),
    ("rope(remap=rerope(0))", r"window must be positive, but got 0.*above zero"),
    ("rope(remap=leaky_rerope(-5, 8))", r"window must be positive, but got -5"),
    ("rope(remap=self_extend(4, 0))", r"window must be positive"),
    ("rope(remap=streaming(4, 0))", r"window must be positive"),
    ("rope(remap=lm_infinite(0))", r"window must be positive"),
    ("rope(remap=inverse_leaky(0, 4))", r"window must be positive"),
    ("rope(remap=dual_chunk(0, 1))", r"size must be positive"),
    ("rpoe()", r"no part is called 'rpoe': use .*rope"),
    ("rope(frequencies=yran(4, original=8))", r"'yran': use .*yarn"),
    ("alibbi()", r"'alibbi': use alibi"),
    ("zzzzzzzz()", r"`longitude schemes`"),
    ("yarn(4, original=8192)", r"inside rope, as in rope\(frequencies=yarn\(4, original=8192\)\)"),
    ("rope(bse=4)", r"rope: .*'bse'.*base"),
    ("yarn(4)", r"original"),
    ("rope(base='x')", r"a finite number, but got 'x': write for example base=10000"),
    ("rope(base=True)", r"a finite number, but got True"),
    ("rope(pairs='thirds')", r"'half' or 'adjacent' or 'polar', but got 'thirds'"),
    ("window(1.5)", r"a whole number.* but got 1\.5"),
    ("window(16, 4, 4)", r"too many"),
    ("causal() + bidirectional()", r"got both"),
    ("alibi() + alibi(future=2)", r"alibi once"),
    ("learned(5) + sinusoidal()", r"one embedding of positions"),
    ("rope(decay=xpos()) + bidirectional()", r"make it causal"),
    ("rope(base=1, base=2)", r"base.*twice"),
    ("layers()", r"at least one"),
    ("layers(a=rope())", r"takes schemes only"),
    ("layers(rope()) + logn(5)", r"layer by layer"),
    ("layers(learned(5), rope())", r"the same"),
    ("split(rope(), layers(rope()))", r"far=…\) takes a scheme, but got layers\(rope\(\)\)"),
    ("split(rope(), 5)", r"takes a scheme, but got 5"),
    ("split(rope(), rope(), share=1)", r"between 0 and 1, but got 1"),
    ("split(rope(), rope(), share='x')", r"a finite number, but got 'x'"),
    ("split(learned(5), rope())", r"the same"),
    ("split(rope(), rope()) + logn(5)", r"layer by layer"),
    ("split(rerope(5) + rerope(6), rope())", r"one site twice"),
    ("rope(remap=rope())", r"a remap part.* but got rope\(\)"),
    ("rope(frequencies=rerope(5))", r"a frequencies part, but got rerope\(5\)"),
    ("5", r"made of parts, but got 5"),
    ("", r"is not a scheme"),
    ("rope() logn(5)", r"is not a scheme"),
    ("rope() - logn(5)", r"neither a part nor"),
    ("irope()", r"no part is called 'irope': use llama4 or"),  # by what its preset is a case of
    ("iRoPE()", r"use llama4\."),
    ("kerple('powr')", r"'log' or 'power', but got 'powr'"),
    ("window(" + "9" * 40 + ")", r"a whole number"),
]


@pytest.mark.parametrize(("text", "words"), NAMED, ids=[t[:40] for t, _ in NAMED])
def test_mistakes_say_what_was_given_and_what_to_do(text, words):
    assert re.search(words, refused(text)), refused(text)


def test_long_texts_and_deep_ones():
    assert "too long" in refused("rope() + " * 20_000 + "rope()")
    refused("(" * 90_000)
    refused("-" * 90_000 + "1")
    refused("+".join(["rope()"] * 10_000))
    refused("layers(" * 5_000 + ")" * 5_000)
    long = ", ".join(["1.2345"] * 64)
    refused(f"longrope(({long}), ({long}), original=4096)")
    refused(f"rope(frequencies=longrope(({long}), ({long}), original=4096)) + rope()")


@pytest.mark.parametrize("name", ["fope", "path", "cope"])
def test_what_the_six_sites_cannot_express_is_refused_by_name(name):
    with pytest.raises(UserError, match=r"arXiv:2\d+\.\d+.*: use ") as refusal:
        parse(f"rope() + {name}()")
    assert str(refusal.value).count(".") == 1 + str(refusal.value).count("arXiv:2")
