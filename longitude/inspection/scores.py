"""What a checkpoint's attention scores do with distance, measured on a text.

The text is read once, past the trained window where the model can. Each layer's queries and keys
are overheard as it runs; scores are made for some of its queries, in blocks, and only their sums by
distance are kept: memory grows with the length and never holds a matrix of all pairs.

Three questions of the seeds' analysis ("inside the trained length scores are bounded, outside they
are not"; Chen et al. 2023, arXiv:2306.15595, section 2) are answered besides: how scores past the
window differ from those inside; what becomes of the very queries and keys of the text when they are
moved to distances that training never had, next to Σ_t |q_t||k_t|, which bounds them everywhere;
and which heads use position, as the share η² of the variance of scores that distance explains
(adjusted for the number of bins; each query's mean is taken off first, because softmax can't see
it). Attention on the first token tells the sinks (Xiao et al. 2023, arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.validate import UserError, shown
from longitude.hf.loading import load
from longitude.hf.patch import applied, own_scheme, trained_length, unpatched
from longitude.inspection.histogram import Tally
from longitude.inspection.qk_hooks import Heard, listen
from longitude.inspection.qk_terms import four_terms
from longitude.inspection.score_rows import Band, Bin, HeadRow, LayerRow, Measured, Moved
from longitude.ops.attention import terms as score_terms
from longitude.ops.eager import softmax

QUERIES = 128
LARGEST = 2**22  # scores of one block
LONGEST = {"cpu": 4096, "cuda": 32_768}  # tokens that are read if no length is given
MOVED, PLACES = 64, 512  # pairs that are moved, and to how many distances on each side
SEED = 0
JOINT = "\n\n"


@dataclass(frozen=True)
class Options:
    """How to measure; everything has a default.

    `length` is in tokens: without it twice the trained window, as far as the device reads in good
    time. `text` are files and folders; without any, the topics of Python's own documentation.
    """

    length: int | None = None
    text: tuple[str, ...] = ()
    queries: int = QUERIES
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    quiet: bool = True


def measure(name: str, options: Options = Options()) -> Measured:  # noqa: B008 (it is frozen)
    """Load a checkpoint and measure its scores."""
    model, tokenizer = load(
        name,
        device=options.device,
        dtype=options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        quiet=options.quiet,
    )
    if tokenizer is None:
        raise UserError(f"{shown(name)} has no tokenizer, so no text can be read: add its files.")
    text = _text(options.text)
    length = _length(model, options.length)
    ids = torch.tensor(_tokens(tokenizer, text, length))
    if len(ids) < length:
        raise UserError(
            f"the text has {len(ids)} tokens, but {length} are to be read: give more text or a "
            f"smaller length."
        )
    called = ", ".join(options.text) or "the topics of Python's documentation"
    return weights(model, ids, name=str(name), text=called, queries=options.queries)


def weights(
    model: Any, ids: Int[Tensor, " n"], *, name: str = "", text: str = "", queries: int = QUERIES
) -> Measured:
    """What the scores of a loaded model do on these tokens."""
    trained = trained_length(model)
    inside = len(ids) if trained is None else min(trained, len(ids))
    rows, put_on = _queries(len(ids), queries), applied(model)
    found: list[LayerRow] = []
    with unpatched(model):
        listen(model, ids, lambda heard: found.append(_layer(heard, rows, inside, trained)))
        terms = four_terms(model, ids[:inside], rows[rows < inside])
        notes = _notes(model, trained, len(ids))
    return Measured(
        model=name,
        scheme=str(own_scheme(model)),
        trained=trained,
        length=len(ids),
        queries=len(rows),
        text=text,
        layers=tuple(sorted(found, key=lambda row: row.layer)),
        terms=terms,
        notes=(*([f"Measured without {put_on}, which was put on it."] if put_on else []), *notes),
    )


def _notes(model: Any, trained: int | None, length: int) -> list[str]:
    if trained is None:
        return ["The configuration names no trained length: all is inside."]
    if length > trained:
        return []
    ends = (most := _most(model)) is not None and most <= trained
    why = "its table of positions ends there" if ends else "give a greater length"
    return [f"Nothing was read past the window of {trained:,}: {why}."]


def _queries(length: int, count: int) -> Int[Tensor, " m"]:
    """Queries spread evenly over the text, but not its very beginning."""
    first = min(length - 1, max(1, length // 16))
    return torch.linspace(first, length - 1, min(count, length - first)).round().long().unique()


# one layer


def _layer(heard: Heard, rows: Int[Tensor, " m"], inside: int, trained: int | None) -> LayerRow:
    heads, n = heard.q.shape[1], heard.q.shape[2]
    tally = Tally(heads, n, inside)
    for part in rows.split(max(1, LARGEST // (heads * n))):
        tally.add(part, *scores(heard, part))
    moved = _moved(heard, trained or n)
    return LayerRow(
        layer=heard.layer,
        written=str(heard.own),
        heads=tuple(
            HeadRow(
                head=h,
                inside=_sure(tally.band(h, 0, inside)),
                past=tally.band(h, inside, n) if inside < n else None,
                position=tally.explained(h, inside),
                sink=tally.sink(h),
                away=tally.away(h),
                moved=moved[h] if moved else None,
                bins=tuple(
                    Bin(a, band) for a, b in pairwise(tally.edges) if (band := tally.band(h, a, b))
                ),
            )
            for h in range(heads)
        ),
    )


def scores(
    heard: Heard, rows: Int[Tensor, " m"]
) -> tuple[Float[Tensor, "h m n"], Tensor, Float[Tensor, "h m n"]]:
    """The scores of some queries with every key, which of them are seen, and the attention."""
    n, place = heard.k.shape[2], heard.q.device
    at = rows.to(place)
    q, k = heard.q[:1, :, at].float(), heard.k[:1].float()
    made = score_terms(heard.left, q, k, at, range(n), scale=heard.scale)
    total = made.content
    for bias in made.biases.values():
        total = total + bias * heard.bias_by
    if heard.softcap:
        total = heard.softcap * torch.tanh(total / heard.softcap)
    sinks = None if heard.sinks is None else heard.sinks.float()
    attended = softmax(total, made.visible, sinks)
    return total[0].cpu(), made.visible[0, 0].cpu(), attended[0].cpu()


def _sure(band: Band | None) -> Band:
    assert band is not None, "every query sees itself, which lies inside"
    return band


def _moved(heard: Heard, trained: int) -> list[Moved] | None:
    """What each head would make of pairs of the text at other distances, if it is turned."""
    found, rope = heard.unturned(), heard.own.rotary
    if found is None or rope is None:
        return None
    q, k = (_complex(x[0], rope.pairs) for x in found)
    n, dim = q.shape[1], rope.dim(heard.q.shape[-1])
    rng = torch.Generator().manual_seed(SEED)
    i, j = torch.randint(n, (2, MOVED), generator=rng)
    group = len(q) // len(k)
    size = heard.scale * rope.frequencies.gain(n)
    pairs = q[:, i] * k.repeat_interleave(group, 0)[:, j].conj() * size  # (heads, moved, half)
    theta = rope.frequencies.inv_freq(dim, rope.base, n).to(pairs.device)
    ends = (0, trained), (trained, 2 * trained)
    swings = [(pairs.abs().sum(-1)).amax(1)]
    for low, high in ends:
        r = torch.linspace(low, high - 1, min(PLACES, high - low), dtype=torch.float64).round()
        wave = torch.polar(torch.ones(()).double(), r.to(theta.device)[:, None] * theta)
        value = torch.einsum("hmt,rt->hmr", pairs, wave.to(pairs.dtype)).real
        swings.append(value.abs().amax((1, 2)))
    ceiling, inside, past = (s.tolist() for s in swings)
    return [Moved(a, b, c) for a, b, c in zip(inside, past, ceiling, strict=True)]


def _complex(x: Float[Tensor, "h n r"], pairs: str) -> Tensor:
    """Rotary dimensions as complex numbers, one for each pair."""
    x = x.double().cpu()
    both = (
        x.unflatten(-1, (2, -1)).unbind(-2)
        if pairs == "half"
        else x.unflatten(-1, (-1, 2)).unbind(-1)
    )
    return torch.complex(both[0], both[1])


# what is read


def _length(model: Any, asked: int | None) -> int:
    trained, place = trained_length(model) or 1024, next(model.parameters()).device.type
    most = _most(model)
    if asked is None:
        return min(2 * trained, LONGEST.get(place, 4096), most or 2 * trained)
    if asked < 16 or (most is not None and asked > most):
        limit = f"16 to {most:,}" if most else "16 or more"
        raise UserError(f"{asked} tokens can't be read by this model: give a length of {limit}.")
    return asked


def _most(model: Any) -> int | None:
    """How many tokens a model has positions for, where they end."""
    embed: Any = own_scheme(model).layer(0).embed
    return None if embed is None else getattr(embed, "reach", embed.length)


def _text(given: tuple[str, ...]) -> str:
    """The text of some files, and of the files in some folders."""
    if not given:
        from pydoc_data.topics import topics

        return JOINT.join(topics.values())
    found = []
    for place in map(Path, given):
        inside = sorted(f for f in place.rglob("*") if f.is_file()) if place.is_dir() else [place]
        found += [_read(file, place.is_dir()) for file in inside]
    return JOINT.join(found)


def _read(file: Path, one_of_many: bool) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if one_of_many:
            return ""  # a folder may hold what is no text
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{shown(str(file))} can't be read ({why}): give a text file.") from None


def _tokens(tokenizer: Any, text: str, length: int) -> list[int]:
    """The first tokens of a text, of which no more is cut than they can take."""
    return tokenizer(text[: 40 * length], verbose=False).input_ids[:length]
