"""A model's own code, read and never imported: the lines that one configuration brings to life.

transformers keeps a model in one file, and much that a configuration leaves unsaid stands there:
whether anything turns, how pairs lie in a head, which layers are left out. `alive` follows the
names from the classes that take a configuration to the classes and functions which those use, and
leaves out branches that the configuration's own entries switch off.
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
        inner = said(config, name)
        if said(inner, "model_type") is not None:
            yield name, inner


def said(config: Any, name: str, default: Any = None) -> Any:
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
    value = said(config, entry, MISSING) if entry else MISSING
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
