"""Parts: small frozen values, each describing one aspect of position, and their protocols.

A part is a frozen dataclass whose fields are numbers, strings, tuples and other parts. It is
hashable, prints as the call that builds it, and is therefore its own cache key. `@part` registers
it under its name in the text form, with its site and its paper, and validates its fields.

A new encoding is one file in `longitude/parts/`: a class under `@part` that inherits from the
protocol of its site (`Bias`, `Scale`, …), which holds the defaults. `OptionalMethods` lists what a
part may add so that `extend`, its search and the lab know it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Real
from torch import Tensor, float64

from longitude.core.lengths import Lengths, Setting
from longitude.core.region import EVERYWHERE, SAME, Area, PairShifts, Shift
from longitude.core.validate import check_field, literal

Site = Literal[
    "positions", "embed", "rotary", "frequencies", "remap", "decay", "axes", "scale", "bias", "mask"
]
Pos = range | Tensor  # a range where positions are contiguous: readable without touching the device
QueryRows = range | tuple[int, ...]  # positions of queries, in ascending order
Weights = dict[str, Tensor]
PerPair = Float[Tensor, " pairs"]  # one number for each rotary pair
Vectors = Float[Tensor, "*b n dim"]  # embeddings of tokens
TokenPositions = Real[Tensor, "... n"]  # positions of tokens, integer or real
Rows = Real[Tensor, "#b _"]  # positions, one row for each sequence or one for all
Factors = Float[Tensor, "#b #h #n"]  # a factor for each query
Q = Float[Tensor, "b h nq d"]
K = Float[Tensor, "b hkv nk d"]
Index = Tensor  # batch, head, query or key indices that broadcast against each other
Term = Callable[[Index, Index, Index, Index], Tensor]  # (b, h, i, j) -> a value added to each score


def hashed_once(cls: type[T]) -> type[T]:
    """Let a frozen dataclass compute its hash only once: parts nest, and are keys of every memo."""
    compute = cls.__hash__

    def hashed(self: Any) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", compute(self))
        return self.__dict__["_hash"]  # type: ignore[no-any-return]

    def state(self: Any) -> dict[str, Any]:  # hashes of strings differ between processes
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__, cls.__getstate__ = hashed, state  # type: ignore[assignment]
    return cls


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes that learned parts need to make their weights."""

    dim: int
    heads: int
    head_dim: int


class OptionalMethods(Protocol):
    """Methods that a part may define for the commands; `optional` calls one if it exists. `Choice`
    is a part or a tuple of parts used together; parts of a rotation are put inside `rope(…)`."""

    integer_positions: ClassVar[bool]  # its weights are for integer positions or distances only

    @classmethod
    def candidates(cls, lengths: Lengths) -> Sequence[Choice]:
        """What `extend` tries by default for models of this site, by the paper's own rule."""
        ...

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> Sequence[Choice]:
        """What `extend --methods all` tries in addition."""
        ...

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        """The parameter values that `extend --search` may try in this part."""
        ...

    @classmethod
    def training(cls, length: int) -> Sequence[Choice]:
        """What `lab --schemes all` trains at this length; a remap without this is never trained."""
        ...

    def at_test(self) -> Any:
        """The part that replaces this one once a model is trained; None if there is none."""
        ...


Choice = Any  # a part, or a tuple of parts


def optional(part: Any, method: str, *args: Any) -> Any:
    """Return the result of an optional method of a part or its class, () if it has none."""
    function = getattr(part, method, None)
    return function(*args) if function else ()


@classmethod
def train_defaults(cls: Any, length: int) -> Sequence[Choice]:
    """The `training` method of parts that need no arguments."""
    return [cls()]


@runtime_checkable
class Positions(Protocol):
    """① A number for each token: random if a generator is given, else the test-time form."""

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos: ...


@runtime_checkable
class HasWeights(Protocol):
    """A part that may have weights: `init` returns fresh ones, {} if nothing is learned."""

    name: ClassVar[str] = ""  # set by @part

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}


@runtime_checkable
class Embed(HasWeights, Protocol):
    """② Embeddings combined with their positions."""

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors: ...


@runtime_checkable
class Frequencies(Protocol):
    """③ The angle per position of each rotary pair, and a gain on the rotated part of the score.
    `inv_freq` keeps transformers' order of operations: float32 results are bitwise equal.
    `by_length` says whether they depend on the total length, which is then an input of the call."""

    by_length: ClassVar[bool] = False

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = float64
    ) -> PerPair: ...

    def gain(self, length: int) -> float:
        return 1.0


@hashed_once
@dataclasses.dataclass(frozen=True)
class Region:
    """One area where q and k are rotated to shifted positions, perhaps at other frequencies."""

    where: Area = EVERYWHERE
    q: Shift | PairShifts = SAME
    k: Shift | PairShifts = SAME
    frequencies: Frequencies | None = None


@runtime_checkable
class RowBands(Protocol):
    """Frequencies or a remap that change with the query's own position, in bands of rows."""

    def bands(self, rows: QueryRows) -> tuple[tuple[Area, Any], ...]:
        """Return the bands that contain any of these rows: their areas, frequencies or regions."""
        ...

    def sample(self, pos: Pos) -> QueryRows:
        """Return a subset of these positions that has members in every band that contains any of
        them, and that includes the first and the last."""
        ...


def by_rows(part: object) -> TypeGuard[RowBands]:
    """Whether frequencies or a remap change with the query's position, in bands of rows."""
    return _has_bands(type(part))


@functools.cache  # an uncached protocol check looks at every method: slower than a kernel launch
def _has_bands(kind: type) -> bool:
    return issubclass(kind, RowBands)


@runtime_checkable
class Remap(Protocol):
    """③ The positions that q and k take, for both signs of i - j; a pair in no region is hidden. A
    remap that is `RowBands` returns the regions of its first band here, and hides nothing."""

    def regions(self) -> tuple[Region, ...]: ...


@runtime_checkable
class Decay(Protocol):
    """③ The logarithm of each pair's gain per step of distance, and the span float32 allows."""

    def rate(self, dim: int) -> PerPair: ...

    def span(self, dim: int) -> float: ...


@runtime_checkable
class Axes(Protocol):
    """③ Several positions per token (a row and a column; time, a row and a column), and the angle
    of each pair per step along each of them.

    If the axes are `temporal`, a text token has the same position on each, and rotates as with one
    position; a remap then acts on the first axis. Other axes have no such distance.
    """

    temporal: ClassVar[bool] = False

    @property
    def count(self) -> int: ...

    def check_dim(self, dim: int) -> None:
        """Raise unless the pairs of this rotary dimension can be divided among the axes."""
        ...

    def weights(self, dims: Dims, dim: int, base: float, rng: torch.Generator | None) -> Weights:
        return {}

    def inv_freq(
        self, frequencies: Frequencies, dim: int, base: float, length: int, weights: Weights
    ) -> Float[Tensor, "axes _ pairs"]: ...


@runtime_checkable
class Scale(HasWeights, Protocol):
    """④ A factor for each query; `seen` counts the keys that it sees under its mask. It must exist
    for every position from 0 on: factors of later tokens are computed in advance."""

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors: ...


@runtime_checkable
class Bias(HasWeights, Protocol):
    """⑤ A term for each score. `q` already includes the factor of ④; products with `q` in the term
    are multiplied by `scale`, the softmax scale. `flat_beyond` is the distance from which the term
    is constant, None if it never is."""

    @property
    def flat_beyond(self) -> int | None:
        return None

    def term(
        self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float
    ) -> Term: ...


@runtime_checkable
class Mask(Protocol):
    """⑥ Which pairs are visible, as disjoint areas."""

    def areas(self) -> tuple[Area, ...]: ...


PARTS: dict[str, type] = {}
T = TypeVar("T")


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def part(name: str, *, site: Site, paper: str) -> Callable[[type[T]], type[T]]:
    """Register a class as a part: frozen, with `name`, `site` and `paper`, its fields validated. A
    class may define `check(self)`, which raises `UserError` for values that make no sense together.
    The only part of a file may omit its docstring and take the module's."""

    def wrap(cls: type[T]) -> type[T]:
        cls.name, cls.site, cls.paper = name, site, paper  # type: ignore[attr-defined]
        cls.__post_init__ = _check  # type: ignore[attr-defined]
        cls.__repr__ = written  # type: ignore[assignment]
        cls.__doc__ = cls.__doc__ or sys.modules[cls.__module__].__doc__
        PARTS[name] = hashed_once(dataclasses.dataclass(frozen=True, repr=False)(cls))
        return PARTS[name]  # type: ignore[return-value]

    return wrap


def written(part: Any) -> str:
    """Format a part as the call that builds it: required fields by position, defaults omitted."""
    arguments = []
    for f in dataclasses.fields(part):
        value, text = getattr(part, f.name), literal(getattr(part, f.name))
        if f.default is dataclasses.MISSING:
            arguments.append(f"{f.name}={text}" if f.kw_only else text)
        elif value != f.default:
            arguments.append(f"{f.name}={text}")
    return f"{part.name}({', '.join(arguments)})"


def _check(self: Any) -> None:
    hints = _hints(type(self))
    for f in dataclasses.fields(self):
        check_field(self.name, f.name, getattr(self, f.name), hints[f.name], f.default)
    if check := getattr(self, "check", None):
        check()


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a part's fields, cached because resolving them is slow."""
    return typing.get_type_hints(cls, include_extras=True)


def as_tensor(pos: Pos, device: torch.device | str | None = None) -> Tensor:
    """Positions as a tensor; a range becomes int64."""
    if isinstance(pos, range):
        return torch.arange(pos.start, pos.stop, pos.step, device=device)
    return pos if device is None else pos.to(device)


def as_rows(pos: Pos, device: torch.device | None = None) -> Tensor:
    """Positions as a tensor (b|1, n)."""
    rows = as_tensor(pos, device)
    return rows if rows.dim() > 1 else rows[None]
