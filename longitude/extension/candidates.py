"""The methods that an extension compares, with windows, factors and groups derived for the model.

From the trained length L to the target T, s = T/L, by each paper's own rule: interpolations take
the factor s (YaRN 2s as well, because it is said to reach less far than its factor);
ReRoPE's window is L/2, and leaky ReRoPE's factor 4s keeps w + (T - w)/k below 3L/4 (Su, kexue.fm
9708, asks for L at most);
Self-Extend groups so that W + (T - W)/G stays within 2/3 of L (Jin et al. 2024); dual chunk takes
3L/4 and L/8 (An et al. 2024); streaming fills the window. "Change nothing" is always among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.parts import Chunked, Window

Own = Scheme | Layers
AUTO, ALL = "auto", "all"
NOTHING = "none"


@dataclass(frozen=True)
class Candidate:
    """A method under its short name, and what it writes in place of the model's own scheme (None:
    nothing)."""

    name: str
    text: str | None


@dataclass(frozen=True)
class Stretch:
    """From the trained length to the target, in the numbers that methods take."""

    trained: int
    target: int

    @property
    def factor(self) -> str:
        """T/L as one would write it, never below it."""
        return _number(self.target / self.trained)

    @property
    def twice(self) -> str:
        return _number(2 * self.target / self.trained)

    @property
    def half(self) -> int:
        return max(1, self.trained // 2)

    @property
    def leak(self) -> int:
        return max(2, -(-4 * self.target // self.trained))

    @property
    def group(self) -> int:
        """The least power of two by which far distances stay within 2/3 of the window."""
        window = self.neighbours
        least = (self.target - window) / (2 * self.trained / 3 - window)
        return 2 ** max(1, (max(2, -int(-least // 1)) - 1).bit_length())

    @property
    def neighbours(self) -> int:
        return max(1, self.trained // 4)


def _rope(s: Stretch) -> list[str]:
    """The ways of rotation that `auto` tries."""
    return [
        f"rope(frequencies=linear({s.factor}))",
        f"rope(frequencies=ntk({s.factor}))",
        f"rope(frequencies=yarn({s.factor}, original={s.trained}))",
        f"rope(frequencies=yarn({s.twice}, original={s.trained}))",
        f"rope(frequencies=dynamic_ntk({s.trained}))",
        f"rope(remap=rerope({s.half}))",
        f"rope(remap=leaky_rerope({s.half}, {s.leak}))",
        f"rope(remap=self_extend({s.group}, {s.neighbours}))",
        f"rope(remap=dual_chunk({3 * s.trained // 4}, {s.trained // 8}))",
        f"rope(remap=streaming(4, {s.trained - 4}))",
    ]


def _more_rope(s: Stretch) -> list[str]:
    """And those that only `all` tries."""
    return [
        f"rope(frequencies=ntk({s.twice}))",
        f"rope(frequencies=ntk_mixed({s.factor}))",
        f"rope(frequencies=by_parts({s.factor}, original={s.trained}))",
        f"rope(frequencies=llama3({s.factor}, original={s.trained}))",
        f"rope(frequencies=dynamic_linear({s.trained}))",
        f"rope(frequencies=dynamic_yarn({s.trained}))",
        f"rope(frequencies=stepped('yarn', original={s.trained}))",
        f"rope(remap=rerope({s.half})) + logn({s.trained})",
        f"rope(remap=rerope({s.neighbours}))",
        f"rope(remap=leaky_rerope({s.half}, {max(2, s.leak // 2)}))",
        f"rope(remap=leaky_rerope({s.half}, {s.leak})) + logn({s.trained})",
        f"rope(remap=leaky_rerope({s.neighbours}, {s.leak}))",
        f"rope(remap=self_extend({s.leak}, {max(1, s.trained // 8)}))",
        f"rope(remap=lm_infinite({s.half}))",
        f"logn({s.trained})",
    ]


def _alibi(s: Stretch) -> list[str]:
    return [f"alibi_interpolated({s.factor})", f"ntk_alibi({s.factor})", f"ntk_alibi({s.twice})"]


def _learned(s: Stretch) -> list[str]:
    names = ("hierarchical", "learned_tiled")
    interpolated = f"learned_interpolated({s.trained}, {s.factor})"
    return [*(f"{name}({s.trained})" for name in names), interpolated]


def _none(s: Stretch) -> list[str]:
    return []


Maker = Callable[[Stretch], list[str]]
FAMILIES: dict[str, tuple[Maker, Maker]] = {  # what auto tries, and what all adds
    "rope": (_rope, _more_rope),
    "alibi": (_alibi, _none),
    "learned": (_learned, _none),
}


def family(own: Own) -> str:
    """Which kind of positions a model has."""
    layers = [own.layer(i, len(own)) for i in range(len(own))]
    if any(one.rotary for one in layers):
        return "rope"
    if layers[0].bias:
        return "alibi"
    if layers[0].embed:
        return "learned"
    raise UserError(f"the model has no positions to extend ({shown(own)}): there is nothing to do.")


def candidates(methods: str, own: Own, trained: int, target: int) -> list[Candidate]:
    """The methods that a text asks for: auto, all, or names and schemes joined by `;`."""
    stretch = Stretch(trained, target)
    first, rest = FAMILIES[family(own)]
    auto = [Candidate(_name(text), text) for text in first(stretch)]
    every = [*auto, *(Candidate(_name(text), text) for text in rest(stretch))]
    asked = [part.strip() for part in methods.split(";") if part.strip()]
    if not asked:
        raise UserError("--methods names none: write auto, all, or for example yarn; leaky_rerope.")
    found = [one for part in asked for one in _named(part, auto, every)]
    once = {one.text: one for one in [Candidate(NOTHING, None), *found]}
    return [Candidate(c.name, c.text and full_layers(c.text, own)) for c in once.values()]


def _name(text: str) -> str:
    """The short name of a method: that of the part which makes it one."""
    scheme = parse(text).layer(0)
    rope = scheme.rotary
    part: Any = (rope.remap or rope.frequencies) if rope else scheme.parts[0]
    return part.name


def _named(part: str, auto: Sequence[Candidate], every: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of one word, or the scheme that is written."""
    if part == NOTHING:
        return []
    if part in (AUTO, ALL):
        return [*(auto if part == AUTO else every)]
    by_name = [one for one in auto if one.name == part] or [c for c in every if c.name == part]
    if by_name:
        return by_name
    if "(" in part:
        parse(part)  # a mistake in it is told here
        return [Candidate(part, part)]
    names = list(dict.fromkeys(one.name for one in every))
    near = get_close_matches(part, names, n=3) or names
    raise UserError(
        f"--methods: no method is called {shown(part)} for this kind of model: use "
        f"{', '.join(near)}, auto, all, or write a scheme."
    )


def full_layers(text: str, own: Own) -> str:
    """The scheme for the layers that see the whole text; those with a window of their own never
    meet a distance they were not trained for."""
    if isinstance(own, Scheme) or text.startswith("layers("):
        return text
    each = [own.layer(i, len(own)) for i in range(len(own))]
    near = [any(isinstance(m, Window | Chunked) for m in one.mask) for one in each]
    if not any(near) or all(near):
        return text
    return f"layers({', '.join(dump(a) if b else text for a, b in zip(each, near, strict=True))})"


def label(scheme: Own, own: Own) -> str:
    """What a scheme changes, as short as can be told: leaky_rerope(128, 16) + logn(256)."""
    from longitude.eval.records import BASELINE

    if scheme == own:
        return BASELINE
    pairs = [(scheme.layer(i, len(own)), own.layer(i, len(own))) for i in range(len(own))]
    told = list(dict.fromkeys(_changes(a, b) for a, b in pairs if a != b))
    return " | ".join(told)


def _changes(scheme: Scheme, own: Scheme) -> str:
    parts = [str(p) for p in scheme.parts if p not in own.parts and p is not scheme.rotary]
    rope, mine = scheme.rotary, own.rotary
    inside = []
    if rope is not None and rope != mine:
        base = mine is None or rope.base != mine.base
        inside += [f"base={rope.base:g}"] if base else []
        for name in ("frequencies", "remap"):
            part = getattr(rope, name)
            inside += [str(part)] if part and part != getattr(mine, name, None) else []
    return " + ".join([*inside, *parts]) or str(scheme)


def by_length(scheme: Own) -> bool:
    """Whether a scheme's numbers depend on how long the whole text is."""
    ropes = [scheme.layer(i, len(scheme)).rotary for i in range(len(scheme))]
    return any(rope.frequencies.by_length for rope in ropes if rope)


def _number(value: float) -> str:
    """A factor with at most two decimals, rounded up."""
    return f"{-int(-round(value * 100, 6) // 1) / 100:g}"
