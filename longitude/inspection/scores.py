"""What a checkpoint's attention scores do with distance, measured on a text.

The text is read once, past the trained window if the model can. Scores are computed for a sample of
queries of each layer as it runs, in blocks, and only sums by distance are stored: memory grows with
the length and never holds a matrix of all pairs.

The results answer three questions (Chen et al. 2023, arXiv:2306.15595, section 2: scores are
bounded inside the trained length and not outside): how scores past the window differ from those
inside; what the text's own queries and keys would score at distances that training never had, next
to Σ_t |q_t||k_t|, which bounds them at any distance; and which heads use position, as the share η²
of the variance of scores that distance explains (adjusted for the number of bins; each query's mean
is removed first, because softmax doesn't see it). Attention on the first token identifies sinks
(Xiao et al. 2023, arXiv:2309.17453).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, short, shown
from longitude.hf.loading import load
from longitude.hf.patch import applied, own_scheme, saved_patch, trained_length, unpatched
from longitude.inspection.qk_hooks import LayerQK, capture_qk, qk_terms
from longitude.inspection.rows import Band, Bin, HeadRow, LayerRow, Moved, ScoreStatistics
from longitude.ops.attention import terms as score_terms
from longitude.ops.eager import softmax

QUERIES = 128
BLOCK = 2**22  # scores computed at once
DEFAULT_LENGTH = {"cpu": 4096, "cuda": 32_768}  # tokens read at most by default
MOVED, PLACES = 64, 512  # pairs moved to other distances; distances inside and past
SEED = 0


def measure(
    name: str,
    *,
    length: int | None = None,
    text: tuple[str, ...] = (),
    queries: int = QUERIES,
    **load_options: Any,
) -> ScoreStatistics:
    """Load a checkpoint, with `longitude.hf.load`'s options, and measure its scores on some files
    and folders, by default the topics of Python's own documentation; the default length is twice
    the trained window, at most DEFAULT_LENGTH."""
    model, tokenizer = load(name, **{"quiet": True, **load_options})
    if tokenizer is None:
        raise UserError(f"{shown(name)} has no tokenizer, so no text can be read: add its files.")
    from pydoc_data.topics import topics

    from longitude.training.data import read_documents

    texts = [d.text.decode() for d in read_documents(text)] if text else topics.values()
    content, limit = "\n\n".join(texts), _max_length(model)
    if length is None:
        trained = trained_length(model) or 1024
        device = next(model.parameters()).device.type
        length = min(2 * trained, DEFAULT_LENGTH.get(device, 4096), limit or 2 * trained)
    elif length < 16 or (limit is not None and length > limit):
        allowed = f"16 to {limit:,}" if limit else "16 or more"
        raise UserError(f"{length} tokens can't be read by this model: give a length of {allowed}.")
    ids = tokenizer(content[: 40 * length], verbose=False).input_ids[:length]
    if len(ids) < length:
        raise UserError(
            f"the text has {len(ids)} tokens, but {length} are to be read: give more text or a "
            f"smaller length."
        )
    source = ", ".join(text) or "the topics of Python's documentation"
    return score_statistics(model, torch.tensor(ids), name=str(name), text=source, queries=queries)


def score_statistics(
    model: Any, ids: Int[Tensor, " n"], *, name: str = "", text: str = "", queries: int = QUERIES
) -> ScoreStatistics:
    """Statistics of a loaded model's scores on these tokens."""
    if (saved := saved_patch(model)) is not None:
        raise UserError(
            f"{name} was saved under {short(saved.text)}, but scores are read of a rotation that "
            f"the configuration holds: leave --weights out."
        )
    trained, length = trained_length(model), len(ids)
    inside = length if trained is None else min(trained, length)
    first = min(length - 1, max(1, length // 16))  # evenly spread, but not the very beginning
    rows = torch.linspace(first, length - 1, min(queries, length - first)).round().long().unique()
    patch, layers = applied(model), []
    notes = [f"Measured without {patch}, which was applied to it."] if patch else []
    with unpatched(model):
        capture_qk(model, ids, lambda qk: layers.append(_layer_row(qk, rows, inside, trained)))
        terms = qk_terms(model, ids[:inside], rows[rows < inside])
        limit = _max_length(model)
    if trained is None:
        notes.append("The configuration names no trained length: all is inside.")
    elif length <= trained:
        ends = limit is not None and limit <= trained
        why = "its position table ends there" if ends else "give a greater length"
        notes.append(f"Nothing was read past the window of {trained:,}: {why}.")
    return ScoreStatistics(
        model=name,
        scheme=str(own_scheme(model)),
        trained=trained,
        length=length,
        queries=len(rows),
        text=text,
        layers=tuple(sorted(layers, key=lambda row: row.layer)),
        terms=terms,
        notes=tuple(notes),
    )


def _max_length(model: Any) -> int | None:
    """How many positions a model has; None if there is no bound."""
    embed: Any = own_scheme(model).layer(0).embed
    return None if embed is None else getattr(embed, "reach", embed.length)


# one layer


def _layer_row(qk: LayerQK, rows: Int[Tensor, " m"], inside: int, trained: int | None) -> LayerRow:
    heads, n = qk.q.shape[1], qk.q.shape[2]
    histogram = ScoreHistogram(heads, n, inside)
    for part in rows.split(max(1, BLOCK // (heads * n))):
        histogram.add(part, *scores(qk, part))
    moved = _moved(qk, trained or n)
    head_rows = []
    for h in range(heads):
        near = histogram.band(h, 0, inside)
        assert near is not None, "every query sees itself, which lies inside"
        bands = ((a, histogram.band(h, a, b)) for a, b in pairwise(histogram.edges))
        head_rows.append(
            HeadRow(
                head=h,
                inside=near,
                past=histogram.band(h, inside, n) if inside < n else None,
                position=histogram.explained_variance(h, inside),
                sink=float(histogram.first[h]) / histogram.rows,
                away=float(histogram.distance[h] / histogram.mass[h].sum().clamp(min=1e-300)),
                moved=moved[h] if moved else None,
                bins=tuple(Bin(edge, band) for edge, band in bands if band),
            )
        )
    return LayerRow(layer=qk.layer, written=str(qk.own), heads=tuple(head_rows))


def scores(
    qk: LayerQK, rows: Int[Tensor, " m"]
) -> tuple[Float[Tensor, "h m n"], Bool[Tensor, "m n"], Float[Tensor, "h m n"]]:
    """The scores of these queries with every key, which are visible, and the attention weights."""
    at = rows.to(qk.q.device)
    q, k = qk.q[:1, :, at].float(), qk.k[:1].float()
    rest = Scheme(bias=qk.own.bias, mask=qk.own.mask)  # q and k are rotated already
    terms = score_terms(rest, q, k, at, range(k.shape[2]), scale=qk.scale)
    total = terms.content
    for bias in terms.biases.values():
        total = total + bias * qk.bias_scale
    if qk.softcap:
        total = qk.softcap * torch.tanh(total / qk.softcap)
    attended = softmax(total, terms.visible, None if qk.sinks is None else qk.sinks.float())
    return total[0].cpu(), terms.visible[0, 0].cpu(), attended[0].cpu()


def _moved(qk: LayerQK, trained: int) -> list[Moved] | None:
    """What each head would score for pairs of the text at other distances, if it has RoPE."""
    pre_rope, rope = qk.pre_rope(), qk.own.rotary
    if pre_rope is None or rope is None:
        return None
    shape, pair = ((2, -1), -2) if rope.pairs == "half" else ((-1, 2), -1)
    q, k = (torch.complex(*x[0].double().cpu().unflatten(-1, shape).unbind(pair)) for x in pre_rope)
    n, dim = q.shape[1], rope.dim(qk.q.shape[-1])
    i, j = torch.randint(n, (2, MOVED), generator=torch.Generator().manual_seed(SEED))
    k = k.repeat_interleave(len(q) // len(k), 0)
    pairs = q[:, i] * k[:, j].conj() * qk.scale * rope.frequencies.gain(n)  # (heads, moved, half)
    theta = rope.inv_freq(dim, n).to(pairs.device)
    largest = []
    for low, high in ((0, trained), (trained, 2 * trained)):
        r = torch.linspace(low, high - 1, min(PLACES, high - low), dtype=torch.float64).round()
        wave = torch.polar(torch.ones(()).double(), r.to(theta.device)[:, None] * theta)
        value = torch.einsum("hmt,rt->hmr", pairs, wave.to(pairs.dtype)).real
        largest.append(value.abs().amax((1, 2)).tolist())
    ceiling = pairs.abs().sum(-1).amax(1).tolist()
    return [Moved(a, b, c) for a, b, c in zip(*largest, ceiling, strict=True)]


class ScoreHistogram:
    """Counts, sums, squares, extremes and attention of each head in bins of the distance |i - j|,
    whose edges are 0, 1, 2, 3, 4, 6, 8, 12, 16, … and `edge`."""

    def __init__(self, heads: int, length: int, edge: int) -> None:
        steps = {0, 1, edge, *(m << s for m in (2, 3) for s in range(40))}
        self.edges = [*sorted(e for e in steps if e < length), length]
        bins, double = len(self.edges) - 1, torch.float64
        self.count = torch.zeros(bins, dtype=double)
        # sums and squares of scores; the same less each query's mean; sums of attention
        self.totals = torch.zeros(5, heads, bins, dtype=double)
        self.sums, self.squares, self.centred, self.centred_squares, self.mass = self.totals
        self.least = torch.full((heads, bins), torch.inf, dtype=double)
        self.greatest = -self.least
        self.first, self.distance = torch.zeros(2, heads, dtype=double)
        self.rows = 0

    def add(
        self,
        queries: Int[Tensor, " m"],
        scores: Float[Tensor, "h m n"],
        seen: Bool[Tensor, "m n"],
        attended: Float[Tensor, "h m n"],
    ) -> None:
        """Add the scores and attention of these queries with every key."""
        mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        away = (queries[:, None] - torch.arange(scores.shape[-1])).abs()[seen]
        raw, centred, mass = (x[:, seen] for x in (scores, scores - mean, attended))
        bins = torch.bucketize(away, torch.tensor(self.edges[1:]), right=True)
        self.count += torch.bincount(bins, minlength=len(self.count))
        index = (bins + len(self.count) * torch.arange(len(raw))[:, None]).flatten()
        sums = (raw, raw.square(), centred, centred.square(), mass)
        for total, values in zip(self.totals, sums, strict=True):
            weights = values.flatten().double()
            total += torch.bincount(index, weights, total.numel()).view_as(total)
        values = raw.flatten().double()
        self.least.view(-1).scatter_reduce_(0, index, values, "amin")
        self.greatest.view(-1).scatter_reduce_(0, index, values, "amax")
        self.distance += (mass * away).sum(1, dtype=torch.float64)
        self.first += attended[:, :, 0].sum(1)
        self.rows += len(queries)

    def band(self, head: int, low: int, high: int) -> Band | None:
        """The scores of distances from one edge up to another; None if there are none."""
        part = slice(self.edges.index(low), self.edges.index(high))
        count = float(self.count[part].sum())
        if not count:
            return None
        mean = float(self.sums[head, part].sum()) / count
        square = float(self.squares[head, part].sum()) / count
        return Band(
            count=int(count),
            mean=mean,
            std=max(0.0, square - mean**2) ** 0.5,
            least=float(self.least[head, part].min()),
            greatest=float(self.greatest[head, part].max()),
            mass=float(self.mass[head, part].sum()) / self.rows,
        )

    def explained_variance(self, head: int, high: int) -> float:
        """The share of the variance of scores, less each query's mean, that bins of distance below
        `high` explain, adjusted for their number: 1 - (within / (N - bins)) / (total / (N - 1))."""
        part = slice(0, self.edges.index(high))
        count, sums = self.count[part], self.centred[head, part]
        used, pairs = int((count > 0).sum()), float(count.sum())
        square = float(self.centred_squares[head, part].sum())
        total = square - float(sums.sum()) ** 2 / max(pairs, 1.0)
        within = square - float((sums.square() / count.clamp(min=1)).sum())
        if total <= 1e-12 * max(square, 1e-300) or pairs <= used:
            return 0.0
        return max(0.0, 1 - (within / (pairs - used)) / (total / (pairs - 1)))
