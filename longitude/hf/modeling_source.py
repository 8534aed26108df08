"""A model's own code, read and never imported: the lines that one configuration brings to life.

transformers keeps a model in one file, and much that a configuration leaves unsaid stands there:
whether anything turns, how pairs lie in a head, which layers are left out. `alive` follows the
names from the classes that take a configuration to the classes and functions which those use, and
leaves out branches that the configuration's own entries switch off.

Which encodings a model's code has: the names by which transformers' authors call them.

Of each encoding a pattern for the lines that make or use it; `kinds` looks for them among the lines
that a configuration brings to life (see code.py). Nothing is run, so this finds names, not numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from sys import modules
from typing import Any, NamedTuple

MISSING = object()
MOST = 1 << 15  # pieces of code, of all models together
TOP = re.compile(r"^(?:class |def |)(\w+)(?=[(:]| = )", re.M)
WORD = re.compile(r"\b[A-Za-z_]\w+\b")
# what names others without using them to compute: notes, decorators, entries of a class
ASIDE = re.compile(
    r'"""(?s:.*?)"""'
    r"|^ *#.*|  #.*|^@.*"
    r"|^    def _init_weights\b(?:.*\n)(?:(?:     .*)?\n)*"
    r"|^    (?:_no_split_modules|_can_record_outputs|_skip_keys\w*|_input_embed_layer) = "
    r"(?:[{\[(]\n(?:     .*\n)*    [}\])]|.*)",
    re.M,
)
TAKES = re.compile(r"^    (?:config: |config_class = )\"?(\w+)", re.M)
GIVEN = re.compile(r"def __init__\(\s*self,\s*config: \"?(\w+)\"?\s*[,)=]")
BORROWS = re.compile(r"^from \.\.(\w+)\.modeling_", re.M)
BASES = re.compile(r"^class \w+\(([^)]*)\)")
BRANCH = re.compile(r"^( +)(if|elif|else)\b ?(.*?):[^\S\n]*$", re.M)
KEPT = re.compile(r"self\.(\w+) = (?:.*\(\n)?[^\n=]*?\bconfig(?:\.|, \")(\w+)\b(?![\[.])")
ASKED = re.compile(
    r"(not )?(?:self\.)?(config\.|self\.)(\w+)"
    r"(?: (==|!=|is not|is) (\"\w*\"|'\w*'|None|True|False))?"
)


@dataclass(frozen=True)
class Code:
    """The classes and functions of a model's file, each with its text; `takes` is the name of the
    configuration that a class is made from."""

    file: Path
    blocks: Mapping[str, str]
    takes: Mapping[str, str]
    bases: Mapping[str, tuple[str, ...]]

    def made_from(self, config: str) -> list[str]:
        """The classes whose configuration is this one, by their own word or their parents'."""
        return [name for name in self.bases if self._taken(name) == config]

    def _taken(self, name: str) -> str | None:
        if name in self.takes:
            return self.takes[name]
        parents = (self._taken(base) for base in self.bases.get(name, ()) if base in self.bases)
        return next(filter(None, parents), None)


def code_of(config: type) -> Code | None:
    """The code beside the class of a configuration; None where there is none to read."""
    home = Path(getattr(modules.get(config.__module__), "__file__", None) or ".")
    if not home.name.startswith("configuration_"):
        return None
    return _read(home.parent, home.name.replace("configuration_", "modeling_"))


def roots_of(config: Any) -> list[str]:
    """The classes that are made from a configuration: models, or else pieces of one."""
    code, name = code_of(type(config)), type(config).__name__
    if code is None:
        return []
    given = (n for n, text in code.blocks.items() if (g := GIVEN.search(text)) and g[1] == name)
    return code.made_from(name) or [*given]


@lru_cache(maxsize=MOST)
def _read(folder: Path, first: str) -> Code | None:
    files = sorted(folder.glob("modeling_*.py"), key=lambda file: file.name != first)
    blocks: dict[str, str] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        blocks = dict(_blocks(text)) | blocks
        for other in BORROWS.findall(text):
            code = _read(folder.parent / other, f"modeling_{other}.py")
            blocks = {**(code.blocks if code and other != "auto" else {}), **blocks}
    if not files:
        return None
    takes = {n: found[1] for n, text in blocks.items() if (found := TAKES.search(text))}
    bases = {n: found[1] for n, text in blocks.items() if (found := BASES.match(text))}
    named = {n: tuple(re.findall(r"\w+", text)) for n, text in bases.items()}
    return Code(files[0], blocks, takes, named)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    found = [*TOP.finditer(text)]
    ends = [*(match.start() for match in found[1:]), len(text)]
    for match, end in zip(found, ends, strict=True):
        yield match[1], ASIDE.sub("", text[match.start() : end])


def alive(config: Any, roots: Iterable[str] = ()) -> dict[str, str]:
    """The classes and functions that a configuration reaches, each with the lines that it brings to
    life: from the classes that are made from it, or from those that are named."""
    code = code_of(type(config))
    if code is None:
        return {}
    held = {type(inner).__name__ for _, inner in inner_configs(config)}
    waiting = list(roots) or roots_of(config)
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in found or name not in code.blocks or _of_another(code, name, held):
            continue
        found[name] = live(code.blocks[name], config)
        waiting += words(found[name]) & code.blocks.keys() - found.keys()
    return found


def inner_configs(config: Any) -> Iterator[tuple[str, Any]]:
    """The configurations inside a configuration, each with the name of its entry."""
    for name in getattr(config, "sub_configs", None) or ():
        inner = entry_of(config, name)
        if entry_of(inner, "model_type") is not None:
            yield name, inner


def entry_of(config: Any, name: str, default: Any = None) -> Any:
    """An entry of a configuration; the default where there is none, or one a layer (Gemma 4)."""
    try:
        return getattr(config, name, default)
    except Exception:  # of a kind of its own: such entries are to be asked of each layer
        return default


def _of_another(code: Code, name: str, held: set[str]) -> bool:
    """Whether a class is made from one of the configurations inside."""
    if not held:
        return False
    given = GIVEN.search(code.blocks[name])
    return code.takes.get(name, given[1] if given else None) in held


@lru_cache(maxsize=MOST)
def words(text: str) -> frozenset[str]:
    """The names in a piece of code."""
    return frozenset(WORD.findall(text))


class Branch(NamedTuple):
    """A branch: how deep it stands, the first of its lines and the end of them, its condition."""

    depth: int
    word: str
    start: int
    end: int
    asked: tuple[str | None, ...] | None


@lru_cache(maxsize=MOST)
def _branches(text: str) -> tuple[Branch, ...]:
    """Its branches, if any of them asks for an entry of the configuration."""
    found = []
    for match in BRANCH.finditer(text):
        asked = ASKED.fullmatch(match[3])
        end = re.compile(rf"\n(?= {{0,{len(match[1])}}}\S)").search(text, match.end())
        stop = end.start() if end else len(text)
        groups = asked.groups() if asked else None
        found.append(Branch(len(match[1]), match[2], match.end(), stop, groups))
    return tuple(found) if any(branch.asked for branch in found) else ()


def live(text: str, config: Any) -> str:
    """A class or function without the branches that a configuration switches off."""
    branches = _branches(text)
    if not branches:
        return text
    kept = dict(KEPT.findall(text))
    dead: list[tuple[int, int]] = []
    taken: dict[int, bool | None] = {}  # of each depth: whether a branch before was taken
    for branch in branches:
        before = taken.get(branch.depth) if branch.word != "if" else False
        holds = True if branch.word == "else" else _holds(branch.asked, config, kept)
        if before or holds is False:
            dead.append((branch.start, branch.end))
        taken[branch.depth] = True if before else (None if None in (before, holds) else holds)
    return _without(text, dead)


def _holds(asked: Any, config: Any, kept: Mapping[str, str]) -> bool | None:
    """Whether a condition on one entry of the configuration holds; None if it can't be told."""
    if asked is None:
        return None
    negated, whose, name, how, other = asked
    entry = name if whose == "config." else kept.get(name)
    value = entry_of(config, entry, MISSING) if entry else MISSING
    if value is MISSING:
        return None
    if how in ("==", "!=") and not isinstance(value, str | bool | None):
        return None
    meant = {"None": None, "True": True, "False": False}.get(other or "", (other or "")[1:-1])
    truth = bool(value) if how is None else (value == meant) == (how in ("==", "is"))
    return truth != bool(negated)


def _without(text: str, dead: list[tuple[int, int]]) -> str:
    pieces, at = [], 0
    for start, end in sorted(dead):
        pieces.append(text[at:start] if start > at else "")
        at = max(at, end)
    return "".join([*pieces, text[at:]])


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
    return bool(asked) and entry_of(config, "position_embedding_type") not in asked


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
