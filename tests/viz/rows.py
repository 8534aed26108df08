"""A run of `longitude extend` made up for the tests of its report: every number by a formula."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from longitude.eval.records import (
    BASELINE,
    CONTEXT,
    COST,
    KEPT,
    LOSS,
    RETRIEVAL,
    Measurement,
    ResultKey,
    Subject,
    Text,
)

HOSTILE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"
MODEL = Subject(
    name=f"tiny {HOSTILE}",
    weights="0123456789abcdef" * 4,
    scheme="rope()",
    family="rope",
    trained=256,
    dtype="float32",
    device="cpu",
)
METHODS = {
    BASELINE: "rope()",
    "linear": "rope(frequencies=linear(8))",
    "ntk": "rope(frequencies=ntk(8))",
    "yarn": "rope(frequencies=yarn(8, original=256))",
    "leaky_rerope": "rope(remap=leaky_rerope(128, 16))",
    "self_extend": "rope(remap=self_extend(128, 16))",
}
LENGTHS = (256, 512, 1024, 2048)
HARDNESS = {"passkey": 0.5, "keys": 1.0, "variables": 1.5}  # of each family's questions
STRETCHES = range(8)  # documents of kept context
DOCUMENTS = [
    Text(name, f"{n:064x}") for n, name in enumerate(["topics", f"a{HOSTILE}.py", SCRIPT, "os.py"])
]
BINS = [(0, 16), (16, 64), (64, 256), (256, 512), (512, 1024), (1024, 2048)]
SLOPES = dict(zip(METHODS, (0.9, 0.25, 0.12, 0.05, -0.02, -0.018), strict=True))  # a doubling
SLOW = dict(zip(METHODS, (1.0, 1.0, 0.99, 1.0, 0.62, 0.55), strict=True))
REFUSED = "Out of memory at 2048 tokens: give a smaller --to or a device with more."
MACHINE = {"cpu": "two cores", "torch": "2.13.0", "longitude": "0.1.0", "python": "3.12"}


def loss(label: str, length: int, document: int) -> float:
    """A loss that grows (or falls) by a slope for each doubling past 256, a bit by document."""
    doublings = LENGTHS.index(length)
    cost = 0.0 if label == BASELINE else 0.01 * list(METHODS).index(label)
    return 1.4 + cost + SLOPES[label] * doublings + 0.03 * document + 0.004 * doublings * document


def kept(label: str, length: int, document: int) -> float:
    """A share that falls as the loss grows; inside the window, 20 % and 2 points more by method."""
    lost = 0.3 * max(0.0, SLOPES[label]) * LENGTHS.index(length)
    return 0.2 + 0.02 * list(METHODS).index(label) - lost + 0.002 * (document - 3.5)


def gains(label: str, length: int) -> list[tuple[float, float]]:
    """The nats of each document's key tokens, and the baseline's without filler."""
    return [(kept(label, length, n) * (10 + n), 10.0 + n) for n in STRETCHES]


def exacts(label: str, length: int, family: str) -> list[bool]:
    """Eight answers, fewer right the further the slope has gone."""
    lost = max(0.0, SLOPES[label]) * LENGTHS.index(length) * HARDNESS[family]
    return [n >= 8 * lost for n in range(8)]


def losses(label: str, length: int, family: str) -> list[float]:
    """Nats per token of each of the eight answers."""
    far = HARDNESS[family] * (1 + max(0.0, SLOPES[label]) * LENGTHS.index(length))
    return [far + 0.01 * n for n in range(8)]


def row(measure: str, label: str, length: int, value: dict[str, Any], **asked: Any) -> Measurement:
    told = {"label": label, "seconds": 0.5, "machine": MACHINE, "refused": None, **value}
    key = ResultKey(measure, MODEL, METHODS[label], length, **asked)
    return Measurement(key, told, "2026-01-31T12:00:00.000000+00:00")


def _of_document(label: str, n: int, text: Text) -> list[Measurement]:
    means = [[length, loss(label, length, n)] for length in LENGTHS]
    bins = [[a, b, loss(label, max(256, b), n) + 2 / (a + 4)] for a, b in BINS]
    read = {"means": means, "bins": bins}
    last = {"last": 128, "lengths": list(LENGTHS)}
    return [
        row(LOSS, label, 2048, read, text=text, protocol={"documents": 4}),
        *(
            row(CONTEXT, label, m, {"loss": loss(label, m, n)}, text=text, protocol=last)
            for m in LENGTHS
        ),
    ]


def _of_method(label: str) -> list[Measurement]:
    rows = [r for n, text in enumerate(DOCUMENTS) for r in _of_document(label, n, text)]
    stretch: dict[str, Any] = {"evidence": 96, "target": 64, "documents": len(STRETCHES)}
    asks: dict[str, Any] = {"prompts": 2, "window": MODEL.trained}
    for length in LENGTHS:
        found = gains(label, length)
        share = sum(nats for nats, _ in found) / sum(of for _, of in found)
        value = {"share": share, "stderr": 0.01, "keys": 99, "gains": found}
        rows.append(row(KEPT, label, length, value, at={"round": 0}, protocol=stretch))
        for family in HARDNESS:
            right, nats = exacts(label, length, family), losses(label, length, family)
            value = {"family": family, "exact": fmean(right), "loss": fmean(nats)}
            value |= {"exacts": right, "losses": nats}
            at = {"family": family, "round": 0}
            rows.append(row(RETRIEVAL, label, length, value, at=at, protocol=asks))
        fast = 90_000 * SLOW[label] / (1 + length / 4096)
        cost = {"prefill": fast, "decode": 1.5 / SLOW[label], "peak": 2**20 * (100 + length // 16)}
        rows.append(row(COST, label, length, cost))
    return rows


def _refused(one: Measurement) -> Measurement:
    """What of a self_extend that ran out of memory at the greatest length."""
    out = one.label == "self_extend" and one.key.length == 2048 and one.key.measure != LOSS
    if not out:
        return one
    kept = {name: one.value[name] for name in ("label", "seconds", "machine")}
    return replace(one, value={**kept, "refused": REFUSED})


FOUND = [_refused(one) for label in METHODS for one in _of_method(label)]
ADVICE: dict[str, Any] = {
    "goal": "context",
    "best": {
        "what": "context",
        "label": "leaky_rerope",
        "scheme": METHODS["leaky_rerope"],
        "sentence": "Use leaky_rerope for a longer context. At 2,048 tokens it keeps 28 % of far "
        "context (95 % CI 28–28); the baseline 20 % at its window of 256. Effective length 2,048 "
        "tokens.",
        "numbers": {"kept": {"mean": 0.28}, "effective_length": 2048},
    },
    "runtimes": [
        {
            "what": runtime,
            "label": "yarn",
            "scheme": METHODS["yarn"],
            "sentence": f"{runtime} can serve yarn unchanged. Effective length 2,048 tokens.",
            "numbers": {},
        }
        for runtime in ("transformers", "vllm", "sglang", "llama.cpp")
    ],
    "factor": {
        "what": "factor",
        "label": "yarn",
        "scheme": METHODS["yarn"],
        "sentence": f"A factor of 8 is enough {HOSTILE}.",
        "numbers": {},
    },
    "helps": True,
    "effective_length": dict(zip(METHODS, (256, 256, 512, 2048, 2048, 1024), strict=True)),
    "forgets": [BASELINE, "linear"],
    "notes": [f"left out to fit into 10m: {HOSTILE}"],
    "search": [
        {
            "label": "leaky_rerope(96, 16)",
            "scheme": "rope(remap=leaky_rerope(96, 16))",
            "start": METHODS["leaky_rerope"],
            "better": True,
            "gain": {"mean": 0.021, "low": 0.01, "high": 0.03, "n": 4},
            "tried": 17,
            "sentence": "leaky_rerope(96, 16) in place of leaky_rerope gains +0.0210 nats a token.",
        },
    ],
    "lm_eval": {
        BASELINE: {"lambada": {"acc,none": 0.123456, "perplexity,none": 81.25}},
        "leaky_rerope": {"lambada": {"acc,none": 0.5}},
    },
}
NEXT = [
    ("Use it in Python", 'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("tiny-rope")'),
    ("Read a long text with it", "longitude stream tiny-rope --window 200 < book.txt"),
    ("Search its parameters", 'longitude extend tiny-rope --search --methods "leaky_rerope"'),
]
MAPS = {
    BASELINE: [(r, float(r), float(r)) for r in range(0, 2048, 32)],
    "yarn": [(r, r / 8, float(r)) for r in range(0, 2048, 32)],
    "leaky_rerope": [
        (r, b, b) for r in range(0, 2048, 32) for b in (min(r, 128 + (r - 128) / 16),)
    ],
}
