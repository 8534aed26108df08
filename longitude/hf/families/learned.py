"""Learned positions: one table of vectors, added to the embeddings (BERT, RoBERTa, GPT-2, OPT, …).

Gehring et al. 2017. While patched, the table reads past its last row by a part's formula: its class
is exchanged for one that stands between the model's own class, which knows how positions are
counted there (OPT from the mask, BART from the cache), and nn.Embedding. Weights, names and the
rows that padding takes stay, and undoing puts the class back. Numbered buffers beside the table,
from which BERT cuts its positions, grow as far as the table reads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families.validate import name, only_part
from longitude.parts import Bidirectional, Causal, Learned

NAMES = ("position_embeddings", "embed_positions", "positions_embed", "wpe")
# modules that place tokens in another way, or in one more, which this scheme would not tell of
OTHERS = ("relative_attention_bias", "rel_embeddings")
LONGEST = 2**20  # positions that are numbered in advance where the model wants them numbered


@runtime_checkable
class Grows(Protocol):
    """A part that reads a table of `length` rows further: `reach` positions, None without end."""

    @property
    def length(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def reach(self) -> int | None: ...

    def rows(self, table: Tensor, pos: Tensor) -> Tensor: ...


class Grown(nn.Embedding):
    """A table that reads on; the rows before its first position are kept for padding."""

    part: ClassVar[Grows]

    def forward(self, input: Tensor) -> Tensor:
        pos = input - self.part.offset
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        rows = self.part.rows(wide, pos.clamp(min=0)).to(self.weight.dtype)
        padding = super().forward(input.clamp(max=self.num_embeddings - 1))
        return torch.where((pos < 0)[..., None], padding, rows)


@dataclass(frozen=True, eq=False)
class Seat:
    """A table, and the module that it stands in."""

    parent: nn.Module
    table: nn.Embedding

    @property
    def offset(self) -> int:
        """The row of position 0."""
        padding = self.table.padding_idx
        return getattr(self.table, "offset", 0 if padding is None else padding + 1)

    @property
    def own(self) -> Learned:
        return Learned(self.table.num_embeddings - self.offset, self.offset)


def claims(model: nn.Module) -> bool:
    """Whether learned tables, all alike, are this model's one way to place its tokens."""
    config: Any = getattr(model, "config", None)
    seats, known = tables(model), getattr(config, "max_position_embeddings", None)
    rows = {seat.table.num_embeddings - getattr(seat.table, "offset", 0) for seat in seats}
    if rows != {known} or len({seat.own for seat in seats}) != 1:  # a table of image patches, say
        return False
    sines = any("sinusoidal" in key and value for key, value in vars(config).items())
    return not sines and not any(
        path.rpartition(".")[2] in OTHERS or "Rotary" in type(module).__name__
        for path, module in model.named_modules()
    )


def scheme(model: nn.Module) -> Scheme:
    """The table, and the direction of attention (the decoder's, where there are both)."""
    own = tables(model)[0].own
    says = ("is_causal", "is_decoder")  # the second is all that MVP's and TrOCR's attention says
    causal = any(getattr(module, flag, False) for module in model.modules() for flag in says)
    way = Causal() if causal or _fixed_masks(model, own.length) else Bidirectional()
    return Scheme.of(own, way)


def patch(
    model: nn.Module, scheme: Scheme | Layers, *, force: bool = False
) -> AbstractContextManager[Scheme]:
    """The model with its table read by a scheme's part."""
    seats, own = tables(model), _own(model)
    rows = seats[0].own
    takes = f"{rows}, or hierarchical(…), learned_interpolated(…) or learned_tiled(…)"
    part = only_part(model, scheme, own, "embed", takes)
    part = replace(part, offset=rows.offset) if getattr(part, "offset", None) == 0 else part
    if part == rows:
        return nullcontext(own)
    if not isinstance(part, Grows):
        raise UserError(f"{name(model)} has {own}, which {part} can't read: give it {takes}.")
    _check_table(model, part, rows, force)
    _check_free(model, seats)
    return _grown(seats, part, replace(own, embed=part))


def _check_table(model: nn.Module, part: Grows, own: Learned, force: bool) -> None:
    """Raise if the part is for another table; with `force` it may leave rows at the end unread."""
    fits = part.length == own.length or (force and part.length < own.length)
    if not fits or part.offset != own.offset:
        raise UserError(
            f"{name(model)} has {own}, which {part} contradicts: give it length={own.length}"
            + (f" and offset={own.offset}." if own.offset else ".")
        )


def _check_free(model: nn.Module, seats: list[Seat]) -> None:
    """Raise if something in the model would go on ending where the table does."""
    for seat in seats:
        if isinstance(seat.table, Grown):
            raise UserError(f"{name(model)} is patched already: leave that patch first.")
        if "forward" in vars(seat.table):
            raise UserError(
                f"{name(model)}'s position table is wrapped, as it is under a device_map: load the "
                f"model onto one device first."
            )
    rows = seats[0].own.length
    if _fixed_masks(model, rows):
        raise UserError(
            f"{name(model)} keeps a mask of {rows} × {rows} tokens, past which its attention can't "
            f"read: use a model that makes its mask for each input, as GPT-2 does."
        )


def _fixed_masks(model: nn.Module, rows: int) -> bool:
    """Whether attention reads its causal mask off a buffer as long and wide as the table."""
    buffers = (
        buffer
        for module in model.modules()
        if "Attention" in type(module).__name__
        for buffer in module.buffers(recurse=False)
    )
    return any(buffer.shape[-2:] == (rows, rows) for buffer in buffers)


@contextmanager
def _grown(seats: list[Seat], part: Grows, full: Scheme) -> Iterator[Scheme]:
    classes = [(seat.table, type(seat.table)) for seat in seats]
    buffers = [(seat.parent, dict(seat.parent._buffers)) for seat in seats]
    try:
        for seat in seats:
            seat.parent._buffers.update(_numbered(seat, part))
            seat.table.__class__ = _class(type(seat.table), part)
        yield full
    finally:
        for table, cls in classes:
            table.__class__ = cls
        for parent, held in buffers:
            parent._buffers.update(held)


def _class(cls: type[nn.Embedding], part: Grows) -> type[nn.Embedding]:
    """The table's own class, with ours in place of nn.Embedding behind it."""
    bases = (Grown,) if cls is nn.Embedding else (cls, Grown)
    return type(f"Grown{cls.__name__}", bases, {"part": part})


def _numbered(seat: Seat, part: Grows) -> dict[str, Tensor]:
    """The buffers with one number for each row, 0, 1, 2, … or all the same, made longer."""
    made, rows = {}, seat.table.num_embeddings
    length = max(rows, min(part.reach or LONGEST, LONGEST) + part.offset)
    for key, held in seat.parent.named_buffers(recurse=False):
        if tuple(held.shape) == (1, rows) and not held.is_floating_point():
            more = torch.arange(rows, length, dtype=held.dtype, device=held.device)[None]
            counts = bool((held[0, 1:] > held[0, :-1]).all())
            more = more if counts else held[:, -1:].expand(-1, more.shape[1])
            made[key] = torch.cat([held, more], 1)
    return made


def tables(model: nn.Module) -> list[Seat]:
    """Every table of learned positions in a model."""
    return [
        Seat(parent, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if key in NAMES and isinstance(child, nn.Embedding) and _plain(type(child))
    ]


def _plain(cls: type) -> bool:
    """Whether it is a table of learned rows, read as they stand."""
    ours = issubclass(cls, Grown)
    return ours or cls is nn.Embedding or cls.__name__.endswith("LearnedPositionalEmbedding")


_own = scheme  # `patch` has a scheme of that name


def resize_positions(model: Any, scheme: Scheme | Layers, length: int) -> Any:
    """A copy of a model whose table holds `length` positions, as the scheme reads them."""
    if not claims(model):
        raise UserError(f"{name(model)} has no table of positions that could be longer.")
    with patch(model, scheme) as full:
        part: Any = full.embed
    if part.reach is not None and part.reach < length:
        raise UserError(
            f"{part} reaches {part.reach:,} positions, but {length:,} are asked for: ask for fewer."
        )
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - part.length  # some count rows for padding as well
    weights = dict(model.state_dict())
    for path, module in model.named_modules():
        if any(module is seat.table for seat in tables(model)):
            weights[f"{path}.weight"] = _rows(module, part, length)
    made = type(model)(config).to(model.dtype).eval()
    made.load_state_dict(weights)
    made.generation_config = getattr(model, "generation_config", None)
    return made


@torch.no_grad()
def _rows(table: nn.Embedding, part: Any, length: int) -> Tensor:
    """The rows for padding, and one for each position."""
    held = table.weight
    wide = held.to(torch.promote_types(held.dtype, torch.float32))
    rows = part.rows(wide, torch.arange(length, device=held.device))
    return torch.cat([held[: part.offset], rows.to(held.dtype)])
