"""Which position encodings a model has, read from its source in transformers and never imported.

Much that a configuration omits is in the model's file: whether anything rotates, the layout of
pairs, which layers are exceptions. `live_source` follows names from the classes that take a
configuration to the classes and functions that these use, without the branches that its entries
disable. `kinds` looks for the names that transformers' authors give to encodings.

Probing a small random model (probe.py) is exact but less complete: of the 788 model types of
transformers 5.22, 526 can be built small from common entries and 219 probed, in ten minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from sys import modules
from typing import Any

MISSING = object()
CACHED_BLOCKS = 1 << 15  # classes and functions of all models together
TOP_LEVEL = re.compile(r"^(?:class |def |)(\w+)(?=[(:]| = )", re.M)
WORD = re.compile(r"\b[A-Za-z_]\w+\b")
# code that mentions names without using them: docstrings, comments, decorators, declarations
NOT_CODE = re.compile(
    r'"""(?s:.*?)"""'
    r"|^ *#.*|  #.*|^@.*"
    r"|^    def _init_weights\b(?:.*\n)(?:(?:     .*)?\n)*"
    r"|^    (?:_no_split_modules|_can_record_outputs|_skip_keys\w*|_input_embed_layer) = "
    r"(?:[{\[(]\n(?:     .*\n)*    [}\])]|.*)",
    re.M,
)
CONFIG = re.compile(r"^    (?:config: |config_class = )\"?(\w+)", re.M)
ARGUMENT = re.compile(r"def __init__\(\s*self,\s*config: \"?(\w+)\"?\s*[,)=]")
IMPORTS_FROM = re.compile(r"^from \.\.(\w+)\.modeling_", re.M)
BASES = re.compile(r"^class \w+\(([^)]*)\)")
BRANCH = re.compile(r"( +)(if|elif|else)\b ?(.*?):\s*$")
ATTRIBUTE = re.compile(r"self\.(\w+) = (?:.*\(\n)?[^\n=]*?\bconfig(?:\.|, \")(\w+)\b(?![\[.])")
CONDITION = re.compile(
    r"(not )?(?:self\.)?(config\.|self\.)(\w+)"
    r"(?: (==|!=|is not|is) (\"\w*\"|'\w*'|None|True|False))?"
)
CONDITIONAL = re.compile(rf"^ +(?:if|elif) {CONDITION.pattern}:[^\S\n]*$", re.M)


@dataclass(frozen=True)
class Source:
    """The classes and functions of a model's file, each with its code, and for each class the name
    of the configuration it declares, and of the one its constructor takes."""

    file: Path
    blocks: Mapping[str, str]
    declared: Mapping[str, str]
    taken: Mapping[str, str]

    def config_of(self, name: str) -> str | None:
        """Return the configuration that a class or one of its parents declares."""
        if name in self.declared:
            return self.declared[name]
        bases = BASES.match(self.blocks[name])
        parents = re.findall(r"\w+", bases[1]) if bases else []
        return next(filter(None, (self.config_of(p) for p in parents if p in self.blocks)), None)


def source_of(config: type) -> Source | None:
    """Return the model source beside a configuration class, or None if there is none."""
    config_file = Path(getattr(modules.get(config.__module__), "__file__", None) or ".")
    if not config_file.name.startswith("configuration_"):
        return None
    return _read(config_file.parent, config_file.name.replace("configuration_", "modeling_"))


@lru_cache(maxsize=CACHED_BLOCKS)
def _read(folder: Path, first: str) -> Source | None:
    files = sorted(folder.glob("modeling_*.py"), key=lambda file: file.name != first)
    blocks: dict[str, str] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        starts = [*TOP_LEVEL.finditer(text)]
        ends = [*(match.start() for match in starts[1:]), len(text)]
        file_blocks = {
            m[1]: NOT_CODE.sub("", text[m.start() : end])
            for m, end in zip(starts, ends, strict=True)
        }
        blocks = file_blocks | blocks
        for model in IMPORTS_FROM.findall(text):
            source = _read(folder.parent / model, f"modeling_{model}.py")
            blocks = {**(source.blocks if source and model != "auto" else {}), **blocks}
    declared, taken = (
        {name: match[1] for name, text in blocks.items() if (match := pattern.search(text))}
        for pattern in (CONFIG, ARGUMENT)
    )
    return Source(files[0], blocks, declared, taken) if files else None


@lru_cache(maxsize=1024)
def code_reads(config: type, key: str, file: str = "modeling") -> bool:
    """Whether the code beside a configuration's class names a key; True if there is no such code.

    No configuration states which entries a model reads, and a list of them would go out of date.
    """
    config_file = Path(getattr(modules.get(config.__module__), "__file__", None) or ".")
    code = config_file.parent / config_file.name.replace("configuration_", f"{file}_")
    if not config_file.name.startswith("configuration_") or not code.is_file():
        return True
    return f'"{key}"' in code.read_text(encoding="utf-8")


def entry_of(config: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a configuration; the default if absent or set per layer (Gemma 4)."""
    try:
        return getattr(config, name, default)
    except Exception:  # of its own type: such entries must be read per layer
        return default


def inner_configs(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configurations nested in a configuration, each with the name of its entry."""
    for name in getattr(config, "sub_configs", None) or ():
        inner = entry_of(config, name)
        if entry_of(inner, "model_type") is not None:
            yield name, inner


def roots_of(config: Any) -> list[str]:
    """Return the classes built from a configuration: models, or else parts of a model."""
    source, name = source_of(type(config)), type(config).__name__
    if source is None:
        return []
    models = [n for n, text in source.blocks.items() if text.startswith("class ")]
    models = [n for n in models if source.config_of(n) == name]
    return models or [n for n, taken in source.taken.items() if taken == name]


def live_source(config: Any, roots: Iterable[str] = ()) -> dict[str, str]:
    """Return the classes and functions that a configuration reaches, without disabled branches.
    The search starts from `roots`, or else from the classes built from the configuration."""
    source = source_of(type(config))
    if source is None:
        return {}
    others = {type(inner).__name__ for _, inner in inner_configs(config)}
    waiting = list(roots) or roots_of(config)
    reached: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in reached or name not in source.blocks:
            continue
        if source.declared.get(name, source.taken.get(name)) in others:
            continue  # built from a configuration nested in this one
        reached[name] = live(source.blocks[name], config)
        waiting += words(reached[name]) & source.blocks.keys() - reached.keys()
    return reached


@lru_cache(maxsize=CACHED_BLOCKS)
def words(text: str) -> frozenset[str]:
    """Return the names in a piece of code."""
    return frozenset(WORD.findall(text))


@lru_cache(maxsize=CACHED_BLOCKS)
def _is_conditional(text: str) -> bool:
    return CONDITIONAL.search(text) is not None


def live(text: str, config: Any) -> str:
    """Return a class or function without the branches that a configuration disables."""
    if not _is_conditional(text):
        return text
    attributes = dict(ATTRIBUTE.findall(text))
    lines: list[str] = []
    taken: dict[int, bool | None] = {}  # for each indentation: whether an earlier branch was taken
    dead: int | None = None  # the indentation of the disabled branch that we are in
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if dead is not None and (not line.strip() or indent > dead):
            continue
        dead = None
        if branch := BRANCH.fullmatch(line):
            earlier = taken.get(indent) if branch[2] != "if" else False
            holds = True if branch[2] == "else" else _holds(branch[3], config, attributes)
            if earlier or holds is False:
                dead = indent
            taken[indent] = True if earlier else (None if None in (earlier, holds) else holds)
        lines.append(line)
    return "\n".join(lines)


def _holds(condition: str, config: Any, attributes: Mapping[str, str]) -> bool | None:
    """Whether a condition on one entry of the configuration holds; None if it can't be decided."""
    match = CONDITION.fullmatch(condition)
    if match is None:
        return None
    negated, owner, name, operator, operand = match.groups()
    entry = name if owner == "config." else attributes.get(name)
    value = entry_of(config, entry, MISSING) if entry else MISSING
    if value is MISSING:
        return None
    if operator in ("==", "!=") and not isinstance(value, str | bool | None):
        return None
    literal = {"None": None, "True": True, "False": False}.get(operand or "", (operand or "")[1:-1])
    truth = bool(value) if operator is None else (value == literal) == (operator in ("==", "is"))
    return truth != bool(negated)


FROZEN_TABLE = re.compile(r"embed_positions\.requires_grad_\(False\)")  # sinusoidal (Whisper)
# patterns of names, in the order in which encodings are listed
NAMES: dict[str, re.Pattern[str]] = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "alibi": r"build\w*alibi",
        "deberta": r"(?!)",  # recognised by a line only
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
# names that indicate an encoding only in a line of this pattern
LINES: dict[str, tuple[str, re.Pattern[str]]] = {
    "rel_embeddings": ("deberta", re.compile(r"\brel_embeddings = nn\.Embedding\(")),
    "rel_pos_emb": ("relative", re.compile(r"\brel_pos_emb = ")),
    "positional_encoding": ("sinusoidal", re.compile(r"\bpositional_encoding\(")),
    "requires_grad_": ("sinusoidal", FROZEN_TABLE),
}
TABLE = re.compile(r"(\w+) = (?:(?:torch\.)?nn\.(?:Embedding|Parameter)|\w*QuantEmbedding)\(")
TABLE_CLASS = re.compile(r"class (?!\w*Sinus)\w*Position\w*\(nn\.Embedding\)")
TABLE_MAKERS = {"Embedding", "Parameter", "QuantEmbedding"}
TABLE_NAME = re.compile(
    r"(?!.*(?:query_pos|tgt_pos|relative|rel_pos))"
    r".*(?:pos(?:ition)?(?:al|s)?_?(?:emb|enc|Emb)|wpe|embed_pos|(?:row|column)_embed|Positional)"
)
# encoding -> others that only implement it: Transformer-XL's R is sinusoidal, RoPE's table too
IMPLIES = {
    "alibi": {"rope"},  # Falcon's code rotates if there is no ALiBi
    "rope": {"sinusoidal"},
    "transformer-xl": {"sinusoidal", "relative"},
    "t5": {"relative"},
    "deberta": {"relative", "t5"},
}
ADJACENT = re.compile(r"::2[\],]|view_as_complex|rotate_every_two\(")
GATE = re.compile(r"if \S*config\.position_embedding_type == \"(\w+)\" else None")
ROTATES = re.compile(r"rot(?:ary|ate)|rope", re.I)


def kinds(source: Mapping[str, str], config: Any = None) -> tuple[str, ...]:
    """Return the encodings in this source, the main one first."""
    present = {kind for text in source.values() for kind in _kinds_in(text)}
    ordered = [kind for kind in NAMES if kind in present]
    # DistilBERT, XLM and FlauBERT fill a table with sines if an entry says so
    entries = vars(config) if config is not None else {}
    if any("sinusoidal" in key and value is True for key, value in entries.items()):
        ordered = ["sinusoidal" if kind == "learned" else kind for kind in ordered]
    # Granite 4 builds a rotation for one value of an entry only
    gates = [match[1] for text in source.values() if (match := GATE.search(text))]
    if gates and "rope" in ordered and entry_of(config, "position_embedding_type") not in gates:
        ordered.remove("rope")
    implied = {other for kind in ordered for other in IMPLIES.get(kind, ())}
    return tuple(kind for kind in dict.fromkeys(ordered) if kind not in implied)


@lru_cache(maxsize=CACHED_BLOCKS)
def _kinds_in(text: str) -> frozenset[str]:
    """Return the encodings that one class or function has."""
    names = words(text)
    found = {kind for name in names for kind in _kinds_named(name)}
    found |= {kind for n in names & LINES.keys() for kind, line in [LINES[n]] if line.search(text)}
    tables = names & TABLE_MAKERS and any(map(TABLE_NAME.match, names))
    if tables and not FROZEN_TABLE.search(text):
        learned = any(map(TABLE_NAME.match, TABLE.findall(text))) or TABLE_CLASS.match(text)
        found |= {"learned"} if learned else set()
    return frozenset(found)


@lru_cache(maxsize=CACHED_BLOCKS)
def _kinds_named(name: str) -> tuple[str, ...]:
    return tuple(kind for kind, pattern in NAMES.items() if pattern.search(name))


def pair_layout(source: Mapping[str, str]) -> tuple[str, bool]:
    """Return the layout of rotary pairs, "adjacent" if the code takes every other dimension, and
    whether pairs adjacent in the weights are first moved half a head apart (DeepSeek-V3)."""
    functions = {n: t for n, t in source.items() if ROTATES.search(n) and t.startswith("def ")}
    uses = [t for n, t in source.items() if "rotate_half" in t and n not in functions]
    rotating = [*functions.values(), *uses]
    rearranging = [t for t in rotating if "::2]" in t and "torch.cat([" in t]
    adjacent = any(ADJACENT.search(t) for t in rotating if t not in rearranging)
    return "adjacent" if adjacent else "half", bool(rearranging)
