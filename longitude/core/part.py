"""Parts: small frozen values, each saying one thing about position, and the protocols they follow.

A part is a frozen dataclass whose fields are numbers, strings, tuples and other parts. It is
hashable, prints as the call that makes it, and is therefore its own cache key. `@part` gives it its
name in the written form, its site and its paper, and checks its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeGuard,
    TypeVar,
    dataclass_transform,
    runtime_checkable,
)

import torch
from jaxtyping import Float, Real
from torch import Tensor

from longitude.core.region import EVERYWHERE, SAME, Area, Shift
from longitude.core.validate import UserError, check_field, literal

Site = Literal[
    "positions", "embed", "rotary", "frequencies", "remap", "decay", "scale", "bias", "mask"
]
Pos = range | Tensor  # a range where positions are contiguous: readable without touching the device
Weights = dict[str, Tensor]
Half = Float[Tensor, " half"]  # one number for each rotary pair
Vectors = Float[Tensor, "*b n dim"]  # embeddings of tokens
Places = Real[Tensor, "... n"]  # positions of tokens, whole or real
Rows = Real[Tensor, "#b _"]  # positions, one row for each sequence or one for all
Factors = Float[Tensor, "#b #h #n"]  # a factor for each query
Queries = Float[Tensor, "b h nq d"]
Keys = Float[Tensor, "b hkv nk d"]
Index = Tensor  # batch, head, query or key indices that broadcast against each other
Term = Callable[
    [Index, Index, Index, Index], Tensor
]  # (b, h, i, j) -> a value to add to each score


def hashed_once(cls: type[T]) -> type[T]:
    """A frozen dataclass that computes its hash once: parts key every memo, and nest."""
    compute = cls.__hash__

    def hashed(self: Any) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", compute(self))
        return self.__dict__["_hash"]  # type: ignore[no-any-return]

    def state(self: Any) -> dict[str, Any]:  # the hash of a text is each process's own
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__, cls.__getstate__ = hashed, state  # type: ignore[assignment]
    return cls


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

    name: ClassVar[str]

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights: ...


@runtime_checkable
class Embed(Learned, Protocol):
    """② Embeddings with their positions in."""

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors: ...


@runtime_checkable
class Frequencies(Protocol):
    """③ How fast each pair turns, and a gain on the rotated dimensions of the score.

    `inv_freq` keeps transformers' order of operations: in float32 it gives transformers' bits.
    `by_length` says whether the total length matters, which is then an input of the call.
    """

    by_length: ClassVar[bool]

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half: ...

    def gain(self, length: int) -> float: ...


@hashed_once
@dataclasses.dataclass(frozen=True)
class Region:
    """One area where queries and keys turn to shifted positions, perhaps at other frequencies."""

    where: Area = EVERYWHERE
    q: Shift = SAME
    k: Shift = SAME
    frequencies: Frequencies | None = None


@runtime_checkable
class Banded(Protocol):
    """Frequencies that change with the query's own position, in bands of rows."""

    def bands(self, reach: int) -> tuple[tuple[Area, Frequencies], ...]: ...


def by_rows(frequencies: object) -> TypeGuard[Banded]:
    """Whether frequencies are `Banded`. Asking a protocol looks at all its methods each time, which
    takes longer than all else that is done before a launch: each kind is asked once."""
    return _banded(type(frequencies))


@functools.cache
def _banded(kind: type) -> bool:
    return issubclass(kind, Banded)


@runtime_checkable
class Remap(Protocol):
    """③ Which positions queries and keys take, for both signs of i - j; a pair in no region is
    hidden."""

    def regions(self) -> tuple[Region, ...]: ...


@runtime_checkable
class Decay(Protocol):
    """③ The logarithm of each pair's gain for one step of distance, and float32's reach of it."""

    def rate(self, dim: int) -> Half: ...

    def span(self, dim: int) -> float: ...


@runtime_checkable
class Scale(Learned, Protocol):
    """④ A factor for each query; `seen` counts the keys that its mask lets it see."""

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors: ...


@runtime_checkable
class Bias(Learned, Protocol):
    """⑤ A term for each score. `q` already carries ④ and the softmax scale.

    `flat_beyond` is the distance from which the term no longer changes, None where it always does.
    """

    @property
    def flat_beyond(self) -> int | None: ...

    def term(
        self, q: Queries, k: Keys, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float
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

    A class may define `check(self)`, which raises `UserError` for values that make no sense
    together.
    """

    def wrap(cls: type[T]) -> type[T]:
        cls.name, cls.site, cls.paper = name, site, paper  # type: ignore[attr-defined]
        cls.__post_init__ = _check  # type: ignore[attr-defined]
        cls.__repr__ = written  # type: ignore[assignment]
        made = hashed_once(dataclasses.dataclass(frozen=True, repr=False)(cls))
        PARTS[name] = made
        return made

    return wrap


def written(part: Any) -> str:
    """A part as the call that makes it: required fields by position, others by name where not
    default."""
    shown = []
    for f in dataclasses.fields(part):
        value, text = getattr(part, f.name), literal(getattr(part, f.name))
        if f.default is dataclasses.MISSING:
            shown.append(f"{f.name}={text}" if f.kw_only else text)
        elif value != f.default:
            shown.append(f"{f.name}={text}")
    return f"{part.name}({', '.join(shown)})"


def _check(self: Any) -> None:
    hints = _hints(type(self))
    for f in dataclasses.fields(self):
        check_field(self.name, f.name, getattr(self, f.name), hints[f.name], f.default)
    if check := getattr(self, "check", None):
        check()


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a part's fields, which take long to work out."""
    return typing.get_type_hints(cls)


def positive(part: Any, *names: str) -> None:
    """Raise unless each of these fields is above zero."""
    for name in names:
        if getattr(part, name) <= 0:
            raise UserError(
                f"{part.name}: {name} must be positive, but got {getattr(part, name)!r}: "
                f"give a {name} above zero."
            )


def not_negative(part: Any, *names: str) -> None:
    """Raise if any of these fields is below zero."""
    for name in names:
        if getattr(part, name) < 0:
            raise UserError(
                f"{part.name}: {name} must not be negative, but got {getattr(part, name)!r}: "
                f"give 0 or more."
            )


def as_tensor(pos: Pos, device: torch.device | str | None = None) -> Tensor:
    """Positions as a tensor; a range becomes int64."""
    if isinstance(pos, range):
        return torch.arange(pos.start, pos.stop, pos.step, device=device)
    return pos if device is None else pos.to(device)
