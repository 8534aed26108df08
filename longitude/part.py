"""Parts: small frozen values, each saying one thing about position, and the protocols they follow.

A part is a frozen dataclass whose fields are numbers, strings, tuples and other parts. It is
hashable, prints as the call that makes it, and is therefore its own cache key. `@part` gives it its
name in the written form, its site and its paper, and checks its fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.region import Area, Region

Site = Literal[
    "positions", "embed", "rotary", "frequencies", "remap", "decay", "scale", "bias", "mask"
]
Pos = range | Tensor  # a range where positions are contiguous: readable without touching the device
Weights = dict[str, Tensor]
Index = Tensor  # batch, head, query or key indices that broadcast against each other
Term = Callable[
    [Index, Index, Index, Index], Tensor
]  # (b, h, i, j) -> a value to add to each score


class Mistake(ValueError):
    """A user's mistake, told in one sentence: what was wrong, what was given, what to do."""


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes that learned parts need to make their weights."""

    dim: int
    heads: int
    head_dim: int


class Part(Protocol):
    """What every part has besides its fields."""

    name: ClassVar[str]
    site: ClassVar[Site]
    paper: ClassVar[str]


@runtime_checkable
class Positions(Protocol):
    """① A number for each token: drawn when a generator is given, the test-time form otherwise."""

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos: ...


@runtime_checkable
class Learned(Protocol):
    """A part with weights: `init` makes fresh ones, {} where nothing is learned."""

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights: ...


@runtime_checkable
class Embed(Learned, Protocol):
    """② Embeddings with their positions in."""

    def embed(self, x: Tensor, pos: Tensor, weights: Weights) -> Tensor: ...


@runtime_checkable
class Frequencies(Protocol):
    """③ How fast each pair turns, and a gain on the rotated dimensions of the score.

    `inv_freq` keeps transformers' order of operations: in float32 it gives transformers' bits.
    `by_length` says whether the total length matters, which is then an input of the call.
    """

    by_length: ClassVar[bool]

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, " half"]: ...

    def gain(self, length: int) -> float: ...


@runtime_checkable
class Banded(Protocol):
    """Frequencies that change with the query's own position, in bands of rows."""

    def bands(self, reach: int) -> tuple[tuple[Area, Frequencies], ...]: ...


@runtime_checkable
class Remap(Protocol):
    """③ Which positions queries and keys take, for both signs of i - j; a pair in no region is
    hidden."""

    def regions(self) -> tuple[Region, ...]: ...


@runtime_checkable
class Decay(Protocol):
    """③ The logarithm of the gain of each pair for one step of distance."""

    def rate(self, dim: int) -> Float[Tensor, " half"]: ...


@runtime_checkable
class Scale(Learned, Protocol):
    """④ A factor for each query; `seen` counts the keys that its mask lets it see."""

    def scale(self, q_pos: Tensor, seen: Tensor, weights: Weights) -> Tensor: ...


@runtime_checkable
class Bias(Learned, Protocol):
    """⑤ A term for each score. `q` already carries ④ and the softmax scale.

    `flat_beyond` is the distance from which the term no longer changes, None where it always does.
    """

    @property
    def flat_beyond(self) -> int | None: ...

    def term(
        self, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, weights: Weights, scale: float
    ) -> Term: ...


@runtime_checkable
class Mask(Protocol):
    """⑥ Which pairs are visible, as disjoint areas."""

    def areas(self) -> tuple[Area, ...]: ...


PARTS: dict[str, type] = {}
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def part(name: str, *, site: Site, paper: str) -> Callable[[type[T]], type[T]]:
    """Make a class a part: frozen, named in the written form, its fields checked when it is made.

    A class may define `check(self)`, which raises `Mistake` for values that make no sense together.
    """

    def wrap(cls: type[T]) -> type[T]:
        cls.name, cls.site, cls.paper = name, site, paper  # type: ignore[attr-defined]
        cls.__post_init__ = _check  # type: ignore[attr-defined]
        cls.__repr__ = written  # type: ignore[assignment]
        made = dataclasses.dataclass(frozen=True, repr=False)(cls)
        PARTS[name] = made
        return made

    return wrap


def written(part: Any) -> str:
    """A part as the call that makes it: required fields by position, others by name where not
    default."""
    shown = []
    for f in dataclasses.fields(part):
        value, text = getattr(part, f.name), _literal(getattr(part, f.name))
        if f.default is dataclasses.MISSING:
            shown.append(f"{f.name}={text}" if f.kw_only else text)
        elif value != f.default:
            shown.append(f"{f.name}={text}")
    return f"{part.name}({', '.join(shown)})"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def _check(self: Any) -> None:
    hints = typing.get_type_hints(type(self))
    for f in dataclasses.fields(self):
        value = getattr(self, f.name)
        if not _fits(value, hints[f.name]):
            raise Mistake(
                f"{self.name}({f.name}=…) takes {_words(hints[f.name])}, but got {value!r}: "
                f"write for example {f.name}={_example(f, hints[f.name])}."
            )
    if check := getattr(self, "check", None):
        check()


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in args)
    if origin is Literal:
        return value in args and type(value) in {type(a) for a in args}
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, args[0]) for v in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint in (int, bool, str, types.NoneType):
        return type(value) is hint
    return isinstance(value, hint) and not isinstance(value, type)


def _words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(a) for a in args)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a tuple, each item {_words(args[0])}"
    plain = {
        int: "a whole number",
        float: "a finite number",
        bool: "True or False",
        str: "a string",
    }
    return (
        "None" if hint is types.NoneType else plain.get(hint) or f"a {hint.__name__.lower()} part"
    )


def _example(f: Any, hint: Any) -> str:
    if f.default is not dataclasses.MISSING:
        return _literal(f.default)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return repr(args[0])
    if typing.get_origin(hint) is tuple:
        return "(1, 2)"
    return {int: "4", float: "4.0", bool: "True", str: "'yarn'"}.get(hint, "…")


def positive(part: Any, *names: str) -> None:
    """Raise unless each of these fields is above zero."""
    for name in names:
        if getattr(part, name) <= 0:
            raise Mistake(
                f"{part.name}: {name} must be positive, but got {getattr(part, name)!r}: "
                f"give a {name} above zero."
            )


def as_tensor(pos: Pos, device: torch.device | str | None = None) -> Tensor:
    """Positions as a tensor; a range becomes int64."""
    if isinstance(pos, range):
        return torch.arange(pos.start, pos.stop, pos.step, device=device)
    return pos if device is None else pos.to(device)
