"""A scheme: the six sites at which position enters a transformer, filled with parts.

ids ─①positions→ p ─②embed→ x ─q,k,v→ ③rotary(q,k) ─④scale(q)→ q·k ─⑤bias─⑥mask→ softmax → out
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch

from longitude.core import part
from longitude.core.region import Area, meet
from longitude.core.validate import UserError, check_field, shown
from longitude.parts import Bidirectional, Causal, Rope, Sequential

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Scheme | Layers]")
PRESETS: dict[str, Callable[..., Any]] = {}  # functions that return a scheme, by name
PAPERS: dict[str, str] = {}  # the paper of each preset
INSIDE_ROPE = ("frequencies", "remap", "decay", "axes")  # their parts are arguments of rope(…)
# the sites that hold at most one part, with their names in error messages
_NOUN = {"positions": "position policy", "embed": "embedding of positions", "rotary": "rotation"}


@part.hashed_once
@dataclass(frozen=True, repr=False)
class Scheme:
    """The parts at the six sites. `Scheme.of(*parts)` sorts parts by site; causal by default."""

    positions: part.Positions = Sequential()  # noqa: RUF009 (a part is frozen)
    embed: part.Embed | None = None
    rotary: Rope | None = None
    bias: tuple[part.Bias, ...] = ()
    scale: tuple[part.Scale, ...] = ()
    mask: tuple[part.Mask, ...] = (Causal(),)
    written: ClassVar[str]  # the text form of this value, set once

    @classmethod
    def of(cls, *parts: Any) -> Scheme:
        """Build a scheme from parts in any order."""
        slots: dict[str, list[Any]] = {site: [] for site in (*_NOUN, "bias", "scale", "mask")}
        for p in parts:
            site = getattr(p, "site", None)
            if part.PARTS.get(getattr(p, "name", "")) is not type(p) or site is None:
                raise UserError(
                    f"a scheme is made of parts, but got {shown(p)}: `longitude schemes` has their "
                    f"names."
                )
            if site in INSIDE_ROPE:
                raise UserError(
                    f"{shown(p)} is no part of a scheme by itself: write it inside rope, as in "
                    f"rope({site}={shown(p)})."
                )
            slots[site].append(p)
        for site, noun in _NOUN.items():
            if len(slots[site]) > 1:
                raise UserError(
                    f"a scheme has one {noun}, but got "
                    f"{' and '.join(map(shown, slots[site][:2]))}: "
                    f"keep one, or give each layer its own with layers(…)."
                )
        single = {site: slots[site][0] for site in _NOUN if slots[site]}
        return cls(
            **single,
            bias=_sorted(slots["bias"]),
            scale=_sorted(slots["scale"]),
            mask=_masks(slots["mask"]),
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", " + ".join(map(str, self.parts)) or str(Causal()))
        if self.rotary and self.rotary.decay and Causal() not in self.mask:
            raise UserError(
                f"{self.rotary.decay} grows without bound towards keys ahead, but the scheme is "
                f"bidirectional: make it causal or leave the decay out."
            )
        if self.rotary and self.rotary.pairs == "polar" and any(map(_reads_heads, self.bias)):
            raise UserError(
                f"rope(pairs='polar') transforms queries and keys, which would be multiplied "
                f"untransformed by {shown(next(filter(_reads_heads, self.bias)))}: keep one."
            )

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that differ from an empty scheme's, in the order of the sites."""
        first = [self.positions] if self.positions != Sequential() else []
        single = [p for p in (self.embed, self.rotary) if p is not None]
        masks = [m for m in self.mask if m != Causal()]
        return (*first, *single, *self.bias, *self.scale, *masks)

    def __repr__(self) -> str:
        return self.written

    def __len__(self) -> int:
        return 1

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """This scheme alone: the counterpart of `Layers.schemes`."""
        return (self,)

    def layer(self, index: int, layers: int | None = None) -> Scheme:
        """The scheme of one layer, which is this one for every layer."""
        return self

    @cached_property  # every layer's cache reads it when it is created
    def causal(self) -> bool:
        """Whether no query sees a key ahead of it."""
        return Causal() in self.mask

    @property
    def gated(self) -> Any:
        """The bias whose gates read each layer's input, None if there is none."""
        return next((bias for bias in self.bias if getattr(bias, "gated", False)), None)

    def areas(self) -> tuple[Area, ...]:
        """The visible pairs, as disjoint areas: inside the masks and some region of the remap."""
        return _areas(self.mask, self.rotary)

    @property
    def windowed(self) -> bool:
        """Whether the masks alone hide the distant past from every query."""
        return all(area.bounded for area in _areas(self.mask, None))

    @cached_property
    def forgets(self) -> bool:
        """Whether masks or remap bound the number of keys a query sees, as `streaming` does."""
        return all(area.bounded for area in self.areas())

    def softmax_scale(self, head_dim: int) -> float:
        """1/√d, or the scale of a bias whose formula replaces it."""
        scales = [b.softmax_scale(head_dim) for b in self.bias if hasattr(b, "softmax_scale")]  # type: ignore[attr-defined]
        return scales[0] if scales else head_dim**-0.5

    def init(self, dims: part.Dims, rng: torch.Generator | None = None) -> part.Weights:
        """Return fresh weights of every learned part, under names such as "t5.table"."""
        learned = [p for p in self.parts if isinstance(p, part.HasWeights)]
        return {f"{p.name}.{key}": w for p in learned for key, w in p.init(dims, rng).items()}

    def settled(self, what: Callable[..., T], written: str, *values: Any) -> T:
        """Return `what(self, *values)` as a constant of torch.compile. The compiler guards
        arguments but not `self`, so the text form is passed too: it guards the scheme."""
        assert written == self.written
        return what(self, *values)

    # torch.compiler.assume_constant_result, without importing the compiler
    settled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def scheme_of(choice: part.Choice) -> Scheme:
    """Build a scheme from a part or a tuple of parts; parts of a rotation go inside `rope(…)`."""
    parts = choice if isinstance(choice, tuple) else (choice,)
    inside = [p for p in parts if getattr(p, "site", None) in INSIDE_ROPE]
    fields = {p.site: p for p in inside}
    if len(fields) < len(inside):
        raise UserError(f"{' + '.join(map(shown, inside))} name one site twice: keep one of each.")
    rope = [Rope(**fields)] if fields else []
    return Scheme.of(*rope, *(p for p in parts if p not in inside))


def _short(scheme: Scheme) -> str:
    """The short form of a scheme, which `scheme_of` expands; the full text if it has none."""
    inside = (getattr(scheme.rotary, site, None) for site in INSIDE_ROPE)
    implied = (None, Rope().frequencies, scheme.rotary)
    parts = tuple(p for p in (*inside, *scheme.parts) if p not in implied)
    return " + ".join(map(str, parts)) if parts and scheme_of(parts) == scheme else str(scheme)


@dataclass(frozen=True, repr=False)
class Layers:
    """A scheme for each layer, repeated if the model has a multiple of as many layers."""

    schemes: tuple[Scheme, ...]

    def __post_init__(self) -> None:
        if not self.schemes:
            raise UserError("layers() names no scheme: give at least one, as in layers(rope()).")
        shared = {(s.positions, s.embed) for s in self.schemes}
        if len(shared) > 1:
            raise UserError(
                "layers(…) differ in positions or embeddings, which a model has once, before its "
                "first layer: give every layer the same."
            )

    def __repr__(self) -> str:
        return f"layers({', '.join(map(str, self.schemes))})"

    def __len__(self) -> int:
        return len(self.schemes)

    def layer(self, index: int, layers: int | None = None) -> Scheme:
        """The scheme of one layer of a model with this many layers."""
        return self.schemes[self.place(index, layers)]

    def place(self, index: int, layers: int | None = None) -> int:
        """The index of a layer's scheme."""
        if layers is not None and (layers < len(self.schemes) or layers % len(self.schemes)):
            raise UserError(
                f"layers(…) names {len(self.schemes)} schemes, which do not tile a model of "
                f"{layers} layers: give a number of schemes that divides {layers}."
            )
        return index % len(self.schemes)


@dataclass(frozen=True, repr=False)
class Split(Layers):
    """Two schemes: the first for this share of a model's layers, rounded, the second for the rest.
    In a model of two layers or more, each has at least one layer."""

    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise UserError(
                f"split: share, the part of the layers that run the first scheme, lies between 0 "
                f"and 1, but got {self.share!r}: write for example share=0.5."
            )

    def __repr__(self) -> str:
        return f"split({', '.join(map(_short, self.schemes))}, share={self.share!r})"

    def place(self, index: int, layers: int | None = None) -> int:
        """0 for the layers of the first scheme, then 1."""
        count = layers or len(self)
        return int(index >= min(max(1, round(self.share * count)), count - 1))


def _reads_heads(bias: part.Bias) -> bool:
    """Whether a bias multiplies q or k with weights: whether shapes depend on head_dim."""
    with torch.device("meta"):  # allocates nothing, however long a table is
        by_head_dim = [bias.init(part.Dims(8, 2, d), None) for d in (8, 16)]
    shapes = [{name: w.shape for name, w in weights.items()} for weights in by_head_dim]
    return shapes[0] != shapes[1]


def _sorted(parts: list[Any]) -> tuple[Any, ...]:
    names = [p.name for p in parts]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise UserError(
            f"a scheme holds {twice} once, but got it {names.count(twice)} times: keep one."
        )
    return tuple(sorted(parts, key=lambda p: p.name))


def _masks(parts: list[Any]) -> tuple[Any, ...]:
    directions = [p for p in parts if p in (Causal(), Bidirectional())]
    if len(set(directions)) > 1:
        raise UserError("a scheme is causal() or bidirectional(), but got both: keep one.")
    return (*(directions[:1] or [Causal()]), *_sorted([p for p in parts if p not in directions]))


@lru_cache(maxsize=256)
def _areas(mask: tuple[part.Mask, ...], rotary: Rope | None) -> tuple[Area, ...]:
    remap = rotary.remap if rotary else None
    unions = [m.areas() for m in mask]
    return meet(*unions, tuple(r.where for r in remap.regions())) if remap else meet(*unions)


def preset(paper: str) -> Callable[[F], F]:
    """Register a function as a preset under its own name; validate its arguments like fields."""

    def register(make: F) -> F:
        @wraps(make)
        def checked(*args: object, **kwargs: object) -> Scheme | Layers:
            signature, hints = inspect.signature(make), get_type_hints(make)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                default = signature.parameters[name].default
                check_field(make.__name__, name, value, hints[name], default)
            return make(*args, **kwargs)

        PRESETS[make.__name__], PAPERS[make.__name__] = checked, paper
        return checked  # type: ignore[return-value]

    return register
