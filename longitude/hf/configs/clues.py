"""Which encodings a model's code has: the names by which transformers' authors call them.

Of each encoding a pattern for the lines that make or use it; `kinds` looks for them among the lines
that a configuration brings to life (see code.py). Nothing is run, so this finds names, not numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from longitude.hf.configs.code import MOST, said, words

FROZEN = re.compile(r"embed_positions\.requires_grad_\(False\)")  # a table of sines: Whisper's
# patterns of names, in the order in which encodings are told
NAMES: dict[str, re.Pattern[str]] = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "alibi": r"build\w*alibi",
        "deberta": r"(?!)",  # told by the line that makes its table alone
        "transformer-xl": r"rel(?:ative)?_shift|^pos_bias_u$|^r_w_bias$",
        "t5": r"relative_(?:positions?_bucket|buckets)",
        "rope": r"^apply_\w*(?:rotary|rope)|^rotate_(?:half|every_two|queries_or_keys)$"
        r"|Rotary(?!Config)|RopePosition",
        "relative": r"^relative_position_bias_table$|RelativePositionBias|^rel_pos_h$"
        r"|^distance_embedding$|^attention_biases$|^emb_rel_k$|^rpb$|^relative_coords_table$"
        r"|Relative(?:AttentionBias|Logits|PositionalEncoding)$",
        "sinusoidal": r"Sinusoid|SinePos|SinusPos|PositionEmbeddingSine|^_?get_sinusoid|^sinusoids"
        r"|create_sinusoidal|sinusoidal_position_embedding|ScaledPositionalEncoding"
        r"|FourierPosition|Cosine1D|^_init_pe$|^max_timescale$",
        "learned": r"Learned\w*Pos|PrecomputedPositionEmbedding|AxialPositionEmbeddings",
        "convolution": r"PositionalConv|(?:DWConv|DepthWiseConv)$",
    }.items()
}
# a name that is a clue, and the line in which it is one
LINES: dict[str, tuple[str, re.Pattern[str]]] = {
    "rel_embeddings": ("deberta", re.compile(r"\brel_embeddings = nn\.Embedding\(")),
    "rel_pos_emb": ("relative", re.compile(r"\brel_pos_emb = ")),
    "positional_encoding": ("sinusoidal", re.compile(r"\bpositional_encoding\(")),
    "requires_grad_": ("sinusoidal", FROZEN),
}
TABLE = re.compile(r"(\w+) = (?:(?:torch\.)?nn\.(?:Embedding|Parameter)|\w*QuantEmbedding)\(")
ITSELF = re.compile(r"class (?!\w*Sinus)\w*Position\w*\(nn\.Embedding\)")
MAKERS = {"Embedding", "Parameter", "QuantEmbedding"}
PLACES = re.compile(
    r"(?!.*(?:query_pos|tgt_pos|relative|rel_pos))"
    r".*(?:pos(?:ition)?(?:al|s)?_?(?:emb|enc|Emb)|wpe|embed_pos|(?:row|column)_embed|Positional)"
)
# an encoding and those that are only its means: Transformer-XL's R is sinusoidal, RoPE's table too
MEANS = {
    "alibi": {"rope"},  # Falcon's code turns where there is no ALiBi
    "rope": {"sinusoidal"},
    "transformer-xl": {"sinusoidal", "relative"},
    "t5": {"relative"},
    "deberta": {"relative", "t5"},
    "sinusoidal": set[str](),
}
ADJACENT = re.compile(r"::2[\],]|view_as_complex|rotate_every_two\(")
GATE = re.compile(r"if \S*config\.position_embedding_type == \"(\w+)\" else None")
TURNS = re.compile(r"rot(?:ary|ate)|rope", re.I)


def kinds(lines: Mapping[str, str], config: Any = None) -> tuple[str, ...]:
    """The encodings whose lines are among these, the chief one first; none is an empty tuple."""
    each = {kind for text in lines.values() for kind in _in(text)}
    found = [kind for kind in NAMES if kind in each]
    if _sinusoidal_by_entry(config) and "learned" in found:
        found = ["sinusoidal" if kind == "learned" else kind for kind in found]
    if "rope" in found and _without_turning(lines, config):
        found.remove("rope")
    beside = {means for kind in found for means in MEANS.get(kind, ())}
    return tuple(kind for kind in dict.fromkeys(found) if kind not in beside)


@lru_cache(maxsize=MOST)
def _in(text: str) -> frozenset[str]:
    """The kinds of which one class or function has a line."""
    names = words(text)
    found = {kind for name in names for kind in _named(name)}
    found |= {
        kind for name in names & LINES.keys() for kind, line in [LINES[name]] if line.search(text)
    }
    if names & MAKERS and any(map(PLACES.match, names)) and not FROZEN.search(text):
        tables = TABLE.findall(text)
        found |= {"learned"} if any(map(PLACES.match, tables)) or ITSELF.match(text) else set()
    return frozenset(found)


@lru_cache(maxsize=MOST)
def _named(name: str) -> tuple[str, ...]:
    return tuple(kind for kind, pattern in NAMES.items() if pattern.search(name))


def _sinusoidal_by_entry(config: Any) -> bool:
    """DistilBERT, XLM and FlauBERT fill a table with sines where an entry says so."""
    entries = vars(config) if config is not None else {}
    return any("sinusoidal" in key and value is True for key, value in entries.items())


def _without_turning(lines: Mapping[str, str], config: Any) -> bool:
    """Whether the code makes a rotation only under another entry than this one: Granite 4."""
    asked = [found[1] for text in lines.values() if (found := GATE.search(text))]
    return bool(asked) and said(config, "position_embedding_type") not in asked


def layout(lines: Mapping[str, str]) -> str:
    """How pairs lie in the head that is turned: "adjacent" where the code takes every other one."""
    return (
        "adjacent" if any(ADJACENT.search(t) for t in _turning(lines) if not _apart(t)) else "half"
    )


def laid_apart(lines: Mapping[str, str]) -> bool:
    """Whether pairs that lie adjacent in the weights are laid half a head apart as they turn:
    DeepSeek-V3."""
    return any(map(_apart, _turning(lines)))


def _turning(lines: Mapping[str, str]) -> list[str]:
    named = {name: t for name, t in lines.items() if TURNS.search(name) and t.startswith("def ")}
    return [
        *named.values(),
        *(t for n, t in lines.items() if "rotate_half" in t and n not in named),
    ]


def _apart(text: str) -> bool:
    return "::2]" in text and "torch.cat([" in text
