"""Everything there is to see of a scheme, as rows."""

from __future__ import annotations

from longitude.core.part import Dims, by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.inspection import curves, lengths, terms
from longitude.inspection.catalogue import row
from longitude.inspection.rows import Page, Sheet
from longitude.parts import Randomized, Sequential


def page(
    scheme: Scheme | Layers, length: int | None = None, dim: int | None = None, heads: int = 8
) -> Page:
    """The rows of a scheme; a length and a head size that fit it are chosen where none is given."""
    each = distinct(scheme)
    longest = max(map(lengths.default_length, each)) if length is None else length
    lengths.check_length(longest)
    size = max(map(lengths.default_dim, each)) if dim is None else dim
    if size < 1 or heads < 1:
        raise UserError(f"{heads} heads of {size} dimensions can't be drawn: give at least one.")
    trained = [n for s in each if (n := lengths.trained(s))]
    return Page(
        written=str(scheme),
        length=longest,
        dim=size,
        heads=heads,
        trained=min(trained, default=None),
        sheets=tuple(sheet(s, longest, size, heads, used) for s, used in each.items()),
    )


def distinct(scheme: Scheme | Layers) -> dict[Scheme, tuple[int, ...]]:
    """Each distinct scheme once, with the layers that use it (none named where all do)."""
    if isinstance(scheme, Scheme):
        return {scheme: ()}
    used: dict[Scheme, tuple[int, ...]] = {}
    for index, s in enumerate(scheme.schemes):
        used[s] = (*used.get(s, ()), index)
    return used


def sheet(scheme: Scheme, length: int, dim: int, heads: int, layers: tuple[int, ...] = ()) -> Sheet:
    """The rows of one scheme at one length."""
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    return Sheet(
        written=str(scheme),
        layers=layers,
        parts=tuple(row(p) for p in (lengths.every(scheme) or scheme.mask)),
        notes=tuple(notes(scheme, length, dims)),
        distances=curves.distances(scheme, length),
        decay=curves.decay(scheme, length, dim),
        wavelengths=curves.wavelengths(scheme, length, dim),
        bias=terms.bias(scheme, length, dims),
        scale=terms.scale(scheme, length, dims),
        visible=curves.grid(scheme, length),
    )


def notes(scheme: Scheme, length: int, dims: Dims) -> list[str]:
    """What the pictures do not say by themselves."""
    said = []
    frequencies = scheme.rotary.frequencies if scheme.rotary else None
    if frequencies and (gain := frequencies.gain(length)) != 1:
        said.append(f"{frequencies} also multiplies the rotary part of every score by {gain:.3f}.")
    if frequencies and frequencies.by_length:
        said.append(f"{frequencies} depends on the length: shown for {length} tokens.")
    if by_rows(frequencies):
        said.append(f"{frequencies} depends on the query: shown for the last one.")
    if isinstance(scheme.positions, Randomized):
        said.append(
            f"{scheme.positions} draws in training: shown evenly spaced, its test-time form."
        )
    elif scheme.positions != Sequential():
        said.append(
            f"{scheme.positions} draws in training: shown with plain positions, its test-time form."
        )
    said += [
        f"{p} is learned: shown at fresh weights (seed {terms.SEED})."
        for p in terms.learned(scheme, dims)
    ]
    if scheme.bias and terms.by_content(scheme, length, dims):
        said.append("The bias depends on content: shown for one random query and key.")
    return said
