"""The methods that `extend` compares: what the parts themselves propose for the model's lengths.

A part's `candidates` and `more_candidates` choose windows, factors and groups by the paper's own
rule (`core/part.py`). Which parts apply depends on how the model encodes positions: frequencies,
remaps and scales for rotary models, biases for models with a bias, embeddings for models with a
table, only scales for models without positions (Jamba, or one whose rotation DroPE dropped). The
unchanged model is always the first candidate. Rotary models are also tried with a split (different
schemes in the lower and the upper layers), which no part can propose by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from longitude.core.lengths import Lengths
from longitude.core.part import PARTS, Site, optional
from longitude.core.scheme import Layers, Scheme, Split, scheme_of
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.eval.records import BASELINE
from longitude.parts import Rerope, Streaming

Own = Scheme | Layers
AUTO, ALL = "auto", "all"
NOTHING = "none"
NARROWEST = 64  # window of the split's ReRoPE, in tokens
FAMILIES: dict[str, tuple[Site, ...]] = {  # the sites whose parts extend each kind of model
    "rope": ("frequencies", "remap", "decay", "scale"),
    "alibi": ("bias",),
    "learned": ("embed",),
    "none": ("scale",),
}


@dataclass(frozen=True)
class Candidate:
    """A method's short name, and the scheme that patches the model (None: the baseline)."""

    name: str
    text: str | None


def family(own: Own) -> str:
    """How a model encodes positions: a key of FAMILIES."""
    if any(scheme.rotary for scheme in own.schemes):
        return "rope"
    if own.layer(0).bias:
        return "alibi"
    if own.layer(0).embed:
        return "learned"
    return "none"


def proposals(family: str, lengths: Lengths, method: str = "candidates") -> list[Candidate]:
    """The candidates that the parts of a family propose, ordered by site; `method` is the parts'
    method to call. For rotary models the "candidates" end with the split."""
    order: list[str] = list(get_args(Site))
    classes: list[Any] = [cls for cls in PARTS.values() if cls.site in FAMILIES[family]]
    splits = family == "rope" and method == "candidates"
    return [
        Candidate(cls.name, dump(scheme_of(choice)))
        for cls in sorted(classes, key=lambda cls: order.index(cls.site))
        for choice in optional(cls, method, lengths)
    ] + [Candidate("split", dump(split(lengths)))] * splits


def split(lengths: Lengths) -> Split:
    """A window with sinks, half the trained length wide, in the lower half of the layers, where
    distant text disturbs most, and a narrow ReRoPE in the upper half, which uses distant text."""
    window = max(lengths.share(8), min(NARROWEST, lengths.share(2)))
    near, far = Streaming(4, max(1, lengths.share(2) - 4)), Rerope(window)
    return Split((scheme_of(near), scheme_of(far)))


def candidates(methods: str, own: Own, trained: int, target: int) -> list[Candidate]:
    """Parse --methods: auto, all, or names and schemes separated by `;`. The baseline is first."""
    lengths, kind = Lengths(trained, target), family(own)
    auto, more = proposals(kind, lengths), proposals(kind, lengths, "more_candidates")
    auto, every = auto or more, [*auto, *more]
    names = [name.strip() for name in methods.split(";") if name.strip()]
    if not names:
        raise UserError("--methods names none: write auto, all, or for example yarn; leaky_rerope.")
    chosen = [candidate for name in names for candidate in _by_name(name, auto, every)]
    distinct = {candidate.text: candidate for candidate in [Candidate(NOTHING, None), *chosen]}
    return [Candidate(c.name, c.text and full_layers(c.text, own)) for c in distinct.values()]


def _by_name(name: str, auto: Sequence[Candidate], every: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that a name stands for, or the scheme that it spells out."""
    if name in (NOTHING, BASELINE):
        return []
    if name in (AUTO, ALL):
        return [*(auto if name == AUTO else every)]
    by_name = [m for m in auto if m.name == name] or [c for c in every if c.name == name]
    if by_name:
        return by_name
    if "(" in name:  # kept as written: only fields that it names replace the model's own
        try:
            parse(name)
            return [Candidate(name, name)]
        except UserError:  # a label of the table lists parts of a rotation without rope(…)
            return [Candidate(name, dump(parse(name, short_form=True)))]
    known = list(dict.fromkeys(m.name for m in every))
    near = get_close_matches(name, known, n=3) or known
    raise UserError(
        f"--methods: no method is called {shown(name)} for this kind of model: use "
        f"{', '.join(near)}, auto, all, or write a scheme."
    )


def full_layers(text: str, own: Own) -> str:
    """Restrict a scheme to the layers that see the full context. Layers with a window never see
    a distance that they were not trained on, so they keep their own scheme."""
    scheme = parse(text)
    if isinstance(own, Scheme) or type(scheme) is Layers:
        return text
    full_attention = [i for i, layer in enumerate(own.schemes) if not layer.windowed]
    if len(full_attention) in (0, len(own)):
        return text
    texts = [*map(dump, own.schemes)]
    for n, i in enumerate(full_attention):
        texts[i] = dump(scheme.layer(n, len(full_attention))) if isinstance(scheme, Split) else text
    return f"layers({', '.join(texts)})"


def label(scheme: Own, own: Own) -> str:
    """Describe briefly what a scheme changes: leaky_rerope(128, 16) + logn(256)."""
    if scheme == own:
        return BASELINE
    if isinstance(scheme, Split):
        ends = zip(scheme.schemes, (own.layer(0), own.layer(len(own) - 1)), strict=True)
        return f"split({', '.join(_changes(a, b) for a, b in ends)}, share={scheme.share!r})"
    pairs = [(scheme.layer(i), own.layer(i)) for i in range(math.lcm(len(scheme), len(own)))]
    return " | ".join(dict.fromkeys(_changes(a, b) for a, b in pairs if a != b))


def _changes(scheme: Scheme, own: Scheme) -> str:
    parts = [str(p) for p in scheme.parts if p not in own.parts and p is not scheme.rotary]
    rope, own_rope = scheme.rotary, own.rotary
    inside = []
    if rope is not None and rope != own_rope:
        if own_rope is None or rope.base != own_rope.base:
            inside.append(f"base={rope.base:g}")
        for name in ("frequencies", "remap"):
            part = getattr(rope, name)
            inside += [str(part)] if part and part != getattr(own_rope, name, None) else []
    return " + ".join([*inside, *parts]) or str(scheme)


def by_length(scheme: Own) -> bool:
    """Whether a scheme's numbers depend on the total length of the text."""
    return any(layer.rotary.frequencies.by_length for layer in scheme.schemes if layer.rotary)
