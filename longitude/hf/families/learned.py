"""Learned absolute positions: a table of vectors added to the embeddings (BERT, GPT-2, OPT, …).

Gehring et al. 2017, arXiv:1705.03122. While patched, the table is read past its last row by the
formula of a part (hierarchical, interpolated, tiled). Its class is replaced by one that inherits
from the model's own class, which knows how positions are counted (OPT from the mask, BART from the
cache), with `ExtendedTable` in place of nn.Embedding. Weights, names and padding rows stay. Buffers
of position ids beside the table, from which BERT slices its positions, grow with the table.

`resize_positions` writes the extended rows into a longer table of the model's own, so that any
program that loads the saved model has them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families import Family, only_part
from longitude.parts import Bidirectional, Causal, Learned

TABLE_NAMES = ("position_embeddings", "embed_positions", "positions_embed", "wpe")
# modules that encode positions in other ways, which this family's scheme would not mention
OTHER_ENCODINGS = ("relative_attention_bias", "rel_embeddings")
MAX_POSITION_IDS = 2**20  # upper bound on buffers of position ids


class ExtendedTable(nn.Embedding):
    """A position table read past its end; rows before its first position are for padding."""

    part: ClassVar[Any]  # extends a table to `part.reach` positions (None: without limit)

    def forward(self, input: Tensor) -> Tensor:
        pos = input - self.part.offset
        rows = _rows(self.weight, self.part, pos.clamp(min=0))
        padding = super().forward(input.clamp(max=self.num_embeddings - 1))
        return torch.where((pos < 0)[..., None], padding, rows)


def _rows(weight: Tensor, part: Any, pos: Tensor) -> Tensor:
    """Return the rows of these positions, computed in at least float32."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return part.rows(wide, pos).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class PositionTable:
    """A learned position table and the module that holds it."""

    parent: nn.Module
    table: nn.Embedding

    @property
    def part(self) -> Learned:
        """The table's length and its offset, the row of position 0."""
        padding = self.table.padding_idx
        offset = getattr(self.table, "offset", 0 if padding is None else padding + 1)
        return Learned(self.table.num_embeddings - offset, offset)


def tables(model: nn.Module) -> list[PositionTable]:
    """Return every table of learned positions in a model."""

    def is_learned(table: nn.Embedding) -> bool:
        plain = type(table) is nn.Embedding or isinstance(table, ExtendedTable)
        return plain or type(table).__name__.endswith("LearnedPositionalEmbedding")

    return [
        PositionTable(parent, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if key in TABLE_NAMES and isinstance(child, nn.Embedding) and is_learned(child)
    ]


def _claims(model: nn.Module) -> bool:
    """Whether learned tables, all alike, are this model's only position encoding."""
    config: Any = getattr(model, "config", None)
    learned, length = tables(model), getattr(config, "max_position_embeddings", None)
    rows = {each.table.num_embeddings - getattr(each.table, "offset", 0) for each in learned}
    if rows != {length} or len({t.part for t in learned}) != 1:  # a table of image patches, say
        return False
    sinusoidal = any("sinusoidal" in key and value for key, value in vars(config).items())
    return not sinusoidal and not any(
        path.rpartition(".")[2] in OTHER_ENCODINGS or "Rotary" in type(module).__name__
        for path, module in model.named_modules()
    )


def _scheme(model: nn.Module) -> Scheme:
    """Return the table and the direction of attention, the decoder's if there are two."""
    own = tables(model)[0].part
    flags = ("is_causal", "is_decoder")  # MVP's and TrOCR's attention has the second only
    causal = any(getattr(module, flag, False) for module in model.modules() for flag in flags)
    return Scheme.of(own, Causal() if causal or _fixed_mask(model, own) else Bidirectional())


def _fixed_mask(model: nn.Module, own: Learned) -> bool:
    """Whether attention takes its causal mask from a buffer of the table's size, as GPT-1 does."""
    return any(
        buffer.shape[-2:] == (own.length, own.length)
        for module in model.modules()
        if "Attention" in type(module).__name__
        for buffer in module.buffers(recurse=False)
    )


def _patch(
    model: nn.Module, scheme: Scheme | Layers, force: bool = False
) -> AbstractContextManager[Scheme]:
    """Read the model's table by the scheme's part, inside a with block.

    With `force`, a part for a shorter table may leave rows at the end unread.
    """
    learned, own, name = tables(model), _scheme(model), type(model).__name__
    rows = learned[0].part
    takes = f"{rows}, or hierarchical(…), learned_interpolated(…) or learned_tiled(…)"
    part = only_part(model, scheme, own, "embed", takes)
    part = replace(part, offset=rows.offset) if getattr(part, "offset", None) == 0 else part
    if part == rows:
        return nullcontext(own)
    if not hasattr(part, "reach"):
        raise UserError(f"{name} has {own}, which {part} can't read: give it {takes}.")
    fits = part.length == rows.length or (force and part.length < rows.length)
    if not fits or part.offset != rows.offset:
        raise UserError(
            f"{name} has {rows}, which {part} contradicts: give it length={rows.length}"
            + (f" and offset={rows.offset}." if rows.offset else ".")
        )
    if any(isinstance(each.table, ExtendedTable) for each in learned):
        raise UserError(f"{name} is patched already: leave that patch first.")
    if any("forward" in vars(each.table) for each in learned):
        raise UserError(
            f"{name}'s position table is wrapped, as it is under a device_map: load the model onto "
            f"one device first."
        )
    if _fixed_mask(model, rows):
        raise UserError(
            f"{name} keeps a mask of {rows.length} × {rows.length} tokens, past which its "
            f"attention can't read: use a model that makes its mask for each input, as GPT-2 does."
        )
    return _extended(learned, part, replace(own, embed=part))


@contextmanager
def _extended(found: list[PositionTable], part: Any, full: Scheme) -> Iterator[Scheme]:
    classes = [(each.table, type(each.table)) for each in found]
    buffers = [(each.parent, dict(each.parent._buffers)) for each in found]
    try:
        for each in found:
            # continue buffers with one integer per row (0, 1, 2, … or all equal)
            rows, cls = each.table.num_embeddings, type(each.table)
            length = max(rows, min(part.reach or MAX_POSITION_IDS, MAX_POSITION_IDS) + part.offset)
            for key, held in [*each.parent.named_buffers(recurse=False)]:
                if tuple(held.shape) == (1, rows) and not held.is_floating_point():
                    added = torch.arange(rows, length, dtype=held.dtype, device=held.device)[None]
                    counting = bool((held[0, 1:] > held[0, :-1]).all())
                    added = added if counting else held[:, -1:].expand(-1, added.shape[1])
                    each.parent._buffers[key] = torch.cat([held, added], 1)
            bases = (ExtendedTable,) if cls is nn.Embedding else (cls, ExtendedTable)
            each.table.__class__ = type(f"Extended{cls.__name__}", bases, {"part": part})
        yield full
    finally:
        for table, cls in classes:
            table.__class__ = cls
        for parent, held in buffers:
            parent._buffers.update(held)


@torch.no_grad()
def resize_positions(model: Any, scheme: Scheme | Layers, length: int) -> Any:
    """Return a copy of a model whose table has `length` positions, as the scheme reads them."""
    if not _claims(model):
        raise UserError(f"{type(model).__name__} has no table of positions that could be longer.")
    with _patch(model, scheme) as full:
        part: Any = full.embed
    if part.reach is not None and part.reach < length:
        raise UserError(
            f"{part} reaches {part.reach:,} positions, but {length:,} are requested: request fewer."
        )
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - part.length  # some count padding rows as well
    weights = dict(model.state_dict())
    table_ids = {id(each.table) for each in tables(model)}
    for path, module in model.named_modules():
        if id(module) in table_ids:
            rows = _rows(module.weight, part, torch.arange(length, device=module.weight.device))
            weights[f"{path}.weight"] = torch.cat([module.weight[: part.offset], rows])
    resized = type(model)(config).to(model.dtype).eval()
    resized.load_state_dict(weights)
    resized.generation_config = getattr(model, "generation_config", None)
    return resized


LEARNED = Family("learned", _claims, _scheme, _patch)
