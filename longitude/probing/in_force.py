"""Which scheme a server runs: the one under which a reference with the same weights fits it best.

Generated texts of several lengths are sent, and the likeliest tokens that the server returns are
compared with those of the reference under each plausible scheme: as meant, the factor lost, another
theta, YaRN's attention factor lost or squared, remap or window dropped, keys and values cached in 8
bits. The misfit is the mean absolute difference of log-probabilities in nats, over the tokens that
the server lists at each generated position; without log-probabilities it is the share of a greedy
answer that differs. Another scheme is named only if it fits significantly better, paired by text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.client import OutOfTime
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.eval.prefill import greedy, lm_head, prefill
from longitude.eval.stats import Interval, paired
from longitude.eval.tasks.questions import NUMBER_OF, WORDS, numbers
from longitude.extension.result import ADVICE, read_runs
from longitude.hf.loading import load
from longitude.hf.merge_scheme import as_layers, merge_scheme
from longitude.hf.patch import (
    applied,
    attention_patched,
    frequencies_replaced,
    only_frequencies,
    probed_layers,
    trained_length,
    undo,
)
from longitude.parts import Bidirectional, Causal, Unscaled
from longitude.parts.rotary_tables import attention_scaling
from longitude.probing.endpoint import CHAT, Answer, Endpoint, Request
from longitude.probing.reach import ladder

TEXTS = 3  # at each length
NEW = 8  # tokens of each answer
THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # the first is what runtimes fall back to
BETTER = 0.7  # share of the meant scheme's misfit that another's must stay below
NO_FIT = 1.0  # nats: beyond it, the weights differ
BLOCK = 32  # values that share a scale in q8_0
# which of query, key and value are rounded: llama.cpp rounds a query like the keys
CACHES = {"q8_0": "qkv", "q8_0, keys alone": "qk", "fp8": "kv"}
Change = Callable[[Scheme], Scheme]
Answered = tuple[list[int], Answer]  # token ids of a text, and the server's answer
Misfits = dict[int, list[float]]  # by length, one per text


@dataclass(frozen=True)
class Hypothesis:
    """What a server may be running: a scheme for each layer, and how its cache rounds."""

    name: str
    layers: tuple[Scheme, ...]
    cache: str = ""  # a key of CACHES
    fix: str = ""

    @property
    def scheme(self) -> str:
        return str(as_layers(self.layers))


@dataclass(frozen=True)
class Fit:
    name: str
    scheme: str
    misfit: float  # nats, or the share that differs
    lengths: Mapping[str, float]
    fix: str = ""


@dataclass(frozen=True)
class InForce:
    """The fit of every hypothesis, best first."""

    fits: tuple[Fit, ...]
    meant: Fit
    gain: Interval  # the meant scheme's misfit minus the best's, by text
    unit: str

    @property
    def best(self) -> Fit:
        return self.fits[0]

    @property
    def as_meant(self) -> bool:
        """Whether nothing else fits significantly better."""
        other = self.best.name != self.meant.name and self.gain.clear
        return not (other and self.best.misfit < BETTER * self.meant.misfit)

    @property
    def undecided(self) -> bool:
        return self.best.misfit > NO_FIT

    @property
    def sentence(self) -> str:
        best, meant, unit = self.best, self.meant, self.unit
        if self.undecided:
            return (
                f"No scheme tried fits the server: the closest, {best.name}, is {best.misfit:.2f} "
                f"{unit} away. It may have other weights, a template or a quantisation of its own."
            )
        if self.as_meant:
            rest = [fit for fit in self.fits if fit.name != meant.name]
            order = "next" if self.best.name == meant.name else "not significantly nearer"
            after = f"; {order}, {rest[0].name}: {rest[0].misfit:.4f}" if rest else ""
            return (
                f"The server runs the intended scheme {meant.scheme}: {meant.misfit:.4f} {unit} "
                f"from the reference on average{after}."
            )
        return (
            f"The server runs {best.scheme} ({best.name}), not the intended {meant.scheme}: "
            f"{best.misfit:.4f} {unit} away on average, against {meant.misfit:.4f} for that one "
            f"(by {self.gain.mean:.3f}, 95 % {self.gain.low:.3f} to {self.gain.high:.3f})."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "in_force": self.best.name if not self.as_meant else self.meant.name,
            "as_meant": self.as_meant,
            "unit": self.unit,
            "gain": asdict(self.gain),
            "fits": [asdict(fit) for fit in self.fits],
        }


def identify(endpoint: Endpoint, reference: str, to: int, device: str = "auto") -> InForce:
    """Fit every hypothesis to a server's answers, from short texts to long ones until the budget is
    spent. Those that are hopeless on short texts are not tried on longer ones, which cost more."""
    model, tokenizer, meant = _load(reference, device)
    tried = hypotheses(meant, [layer.scheme for layer in probed_layers(model)])
    reference_model = _Reference(model, tokenizer)
    misfit = reference_model.nats if endpoint.with_logprobs else reference_model.disagreement
    all_misfits: dict[str, Misfits] = {h.name: {} for h in tried}
    left = tried
    try:
        for length in ladder(to):
            answered = _answers(endpoint, tokenizer, length)
            misfits = {}
            for h in left if answered else ():
                endpoint.check_time()
                endpoint.show(f"which scheme is in force: {h.name}, {length:,} tokens")
                with under(model, h):
                    misfits[h.name] = [misfit(ids, answer) for ids, answer in answered]
            for name, values in misfits.items():
                all_misfits[name][length] = values
            means = {h.name: _mean(all_misfits[h.name]) for h in left}
            least = min(means.values())
            left = [h for h in left if h is tried[0] or means[h.name] < least + NO_FIT]
    except OutOfTime:
        if not all_misfits[tried[0].name]:
            raise
    if not all_misfits[tried[0].name]:
        raise UserError("every text for --reference was refused: see where input ends.")
    fits = []
    for h in tried:
        by_length = {str(n): fmean(values) for n, values in all_misfits[h.name].items()}
        fits.append(Fit(h.name, h.scheme, _mean(all_misfits[h.name]), by_length, h.fix))
    ordered = sorted(fits, key=lambda fit: (fit.misfit, fit.name != tried[0].name))
    nearest, intended = all_misfits[ordered[0].name], all_misfits[tried[0].name]
    gain = paired(
        [value for n in nearest for value in intended[n]], [v for n in nearest for v in nearest[n]]
    )
    unit = "nats" if endpoint.with_logprobs else "of the greedy answer"
    return InForce(tuple(ordered), fits[0], gain, unit)


def _answers(endpoint: Endpoint, tokenizer: Any, length: int) -> list[Answered]:
    """A server's answers to texts of one length, with their token ids, unless it refuses them."""
    texts = [
        ledger(tokenizer, length - 2 * NEW, random.Random(f"ledger {length} {n}"))
        for n in range(TEXTS)
    ]
    what = f"which scheme is in force, {length:,} tokens"
    answers = endpoint.ask_all([Request(text, NEW) for text in texts], what)
    return [
        (_prompt_ids(tokenizer, text, endpoint.api), answer)
        for text, answer in zip(texts, answers, strict=True)
        if not answer.refused
    ]


def hypotheses(meant: Sequence[Scheme], own: Sequence[Scheme]) -> list[Hypothesis]:
    """The meant scheme first, then each distinct plausible alternative."""
    changes: dict[str, Change] = {
        "factor lost": lambda s: _rotary(s, frequencies=Unscaled()),
        "remap lost": lambda s: _rotary(s, remap=None),
        **{
            f"theta lost ({base:,.0f})" if base == THETAS[0] else f"another theta ({base:,.0f})": (
                lambda s, base=base: _rotary(s, base=base)
            )
            for base in THETAS
        },
        "attention factor lost": lambda s: _attention(s, 0),
        "attention factor squared": lambda s: _attention(s, 2),
        "window dropped": lambda s: replace(
            s, mask=tuple(m for m in s.mask if m in (Causal(), Bidirectional()))
        ),
    }
    distinct = {tuple(meant): Hypothesis("as meant", tuple(meant))}
    for name, change in changes.items():
        layers = tuple(map(change, meant))
        distinct.setdefault(layers, Hypothesis(name, layers))
    distinct.setdefault(tuple(own), Hypothesis("baseline", tuple(own)))
    plain = tuple(_rotary(s, frequencies=Unscaled(), remap=None) for s in own)
    distinct.setdefault(plain, Hypothesis("baseline without scaling", plain))
    fix = "cache keys and values in 16 bits (--kv-cache-dtype auto, --cache-type-k f16)."
    cached = [Hypothesis(f"cache in 8 bits ({kind})", tuple(meant), kind, fix) for kind in CACHES]
    return [*distinct.values(), *cached]


def _rotary(scheme: Scheme, **fields: Any) -> Scheme:
    rope = scheme.rotary
    return scheme if rope is None else replace(scheme, rotary=replace(rope, **fields))


def _attention(scheme: Scheme, power: int) -> Scheme:
    """The scheme with YaRN's or LongRoPE's attention factor raised to a power."""
    rope = scheme.rotary
    if rope is None or not hasattr(rope.frequencies, "attention_factor"):
        return scheme
    factor = attention_scaling(rope.frequencies, 1) ** power
    frequencies: Any = rope.frequencies
    return _rotary(scheme, frequencies=replace(frequencies, attention_factor=factor))


def _load(reference: str, device: str) -> tuple[Any, Any, list[Scheme]]:
    """The reference model, its tokenizer, and the scheme meant for each layer."""
    name, text = reference, None
    if (Path(reference) / ADVICE).is_file():
        run = read_runs([Path(reference)])[0]
        name, scheme = run.subject.name, run.best.scheme
        text = None if scheme is None else str(scheme)
    model, tokenizer = load(name, device=device, dtype="float32", quiet=True)
    if tokenizer is None:
        raise UserError(f"--reference {name} has no tokenizer: add its files.")
    text = text or applied(model)
    undo(model)
    own = [layer.scheme for layer in probed_layers(model)]
    meant = own if text is None else merge_scheme(text, own, trained_length(model), force=True)
    return model, tokenizer, meant


def ledger(tokenizer: Any, tokens: int, rng: random.Random) -> str:
    """A text of at most this many tokens: numbers of many objects, and the question for one."""
    lines, length = [], 0
    while True:
        word = rng.choice(WORDS)
        line = NUMBER_OF.format(word=word, number=numbers(rng, 1)[0])
        length += len(tokenizer(f"{line}\n", add_special_tokens=False).input_ids)
        if length > tokens - len(line) and lines:
            break
        lines.append(line)
    return "\n".join([*lines, rng.choice(lines).rpartition(" ")[0]])


def _prompt_ids(tokenizer: Any, text: str, api: str) -> list[int]:
    if api == CHAT and getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]
    return tokenizer(text, verbose=False).input_ids


class _Reference:
    """The reference model, under the hypothesis that a server's answers are compared with."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        id_by_text: dict[str, int | None] = {}
        for index in range(len(tokenizer)):
            piece = str(tokenizer.convert_ids_to_tokens(index)).replace("▁", " ")
            for text in {tokenizer.decode([index]), piece}:
                id_by_text[text] = index if id_by_text.get(text, index) == index else None
        # token ids by text, as servers write it; texts that several tokens share are left out
        self.ids = {text: n for text, n in id_by_text.items() if n is not None and text}

    def nats(self, ids: list[int], answer: Answer) -> float:
        """The mean absolute difference over listed tokens, up to the first generated token that
        can't be identified by its text."""
        known: list[int] = []
        for token in answer.tokens[: len(answer.top) - 1]:
            if token not in self.ids:
                break
            known.append(self.ids[token])
        head, states = lm_head(self.model), []
        with torch.no_grad():
            for read in prefill(self.model, torch.tensor([ids + known]), head=head):
                states = [*states, read.hidden[0]][-2:]
            last = torch.cat(states)[-len(known) - 1 :]
            logprobs = head(last).float().log_softmax(-1).cpu()
        gaps = [
            abs(value - logprobs[n, self.ids[token]].item())
            for n, top in enumerate(answer.top[: len(known) + 1])
            for token, value in top.items()
            if token in self.ids
        ]
        return fmean(gaps) if gaps else 0.0

    def disagreement(self, ids: list[int], answer: Answer) -> float:
        """The share of the greedy answer that follows its common prefix with the server's."""
        tokens = greedy(self.model, torch.tensor(ids), NEW)
        text = self.tokenizer.decode(tokens)
        if not text:
            return float(bool(answer.text))
        same = next(
            (n for n, (a, b) in enumerate(zip(text, answer.text, strict=False)) if a != b),
            min(len(text), len(answer.text)),
        )
        return 1 - same / len(text)


def _mean(misfits: Misfits) -> float:
    flat = [value for values in misfits.values() for value in values]
    return fmean(flat) if flat else 0.0


@contextmanager
def under(model: nn.Module, one: Hypothesis) -> Iterator[None]:
    layers, schemes = probed_layers(model), list(one.layers)
    if only_frequencies(layers, schemes):
        patch = frequencies_replaced(layers, schemes)
    else:
        patch = attention_patched(model, layers, schemes)
    with patch, rounded_cache(model, one.cache):
        yield


@contextmanager
def rounded_cache(model: nn.Module, kind: str) -> Iterator[None]:
    """Round keys and values as an 8-bit cache stores them: llama.cpp's q8_0, or fp8 (e4m3)."""
    if not kind:
        yield
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ):
        tensors = {"q": query, "k": key, "v": value}
        q, k, v = (eight_bits(x, kind) if n in CACHES[kind] else x for n, x in tensors.items())
        return sdpa_attention_forward(module, q, k, v, *args, **more)

    name = f"longitude_cache_{kind}"  # one name per kind: the registry is global
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = name if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before


def eight_bits(x: Tensor, kind: str) -> Tensor:
    """A tensor as an 8-bit cache returns it."""
    if kind == "fp8":
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    size = BLOCK if x.shape[-1] % BLOCK == 0 else x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    stored = scale.half().to(x.dtype)  # used to dequantise; values are divided by the exact scale
    return (blocks / scale).round().mul(stored).flatten(-2)
