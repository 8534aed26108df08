"""What inference and training runtimes compute from a model's settings, and how a scheme is written
for each of them.

A runtime is one module in this folder. It defines `RUNTIME = Runtime(name="…", …)` with `emulate`
(what the runtime's own code computes from given settings) and `write` (settings for a scheme). The
known issues that explain a difference are in issues.toml, or with the runtime. Every command finds
it there: `runtimes()` looks through the folder, and nothing else names a runtime.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal

from longitude.core.validate import UserError

if TYPE_CHECKING:
    from longitude.core.scheme import Layers, Scheme
    from longitude.runtimes.checkpoint import Checkpoint
    from longitude.runtimes.effective import Effective
    from longitude.runtimes.target import Target

DEFINITION = re.compile(r'^RUNTIME = Runtime\(\s*name="([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Issue:
    """A known way in which a runtime computes something else than its settings suggest."""

    name: str
    affects: str  # of "frequencies", "attention", "length", "remap" and "start", by spaces; "": a
    # mere note
    sentence: str
    fix: str


@dataclass(frozen=True)
class Settings:
    """A scheme as one runtime is given it."""

    entries: Mapping[str, Any]  # as `emulate` reads them
    text: str = ""  # the command or the file's contents, if not the runtime's `start`
    config: Mapping[str, Any] | None = None  # config.json of a folder of its own
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # what else lies in that folder


Question = Mapping[str, Any]
TopTokens = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Runner:
    """How a runtime is run on this machine, so that what it computes can be compared.

    `top_tokens` gets `path` (a folder, a name on the Hub or a GGUF file), `settings` (as `emulate`
    reads them), `ids`, `lengths`, `length` (the one that is served), `top`, `threads` and `drawn`
    (a token to generate where one must be), and returns for each of `lengths` the `top` likeliest
    tokens after the first so many ids, with their log-probabilities. Everything is computed in
    float32, so that only settings can make a difference.
    """

    module: str  # which is there if the runtime is installed
    install: str  # what pip is to install otherwise
    top_tokens: Callable[[Question], TopTokens]


def in_process(*command: str, question: Question) -> TopTokens:
    """The answer of a Python program, which keeps a runtime's output and aborts outside: it reads
    the question as JSON, and the last line that it prints is the answer."""
    given = json.dumps(question)
    ran = subprocess.run([sys.executable, *command], input=given, capture_output=True, text=True)
    if ran.returncode == 0:
        with suppress(ValueError, IndexError):
            return json.loads(ran.stdout.splitlines()[-1])
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()] or ["no message"]
    marked = (line for mark in ("error:", "error") for line in lines if mark in line.lower())
    raise RuntimeError(next(marked, lines[-1]))


@dataclass(frozen=True)
class Runtime:
    """All that the commands know about one runtime. Texts may hold {folder}, {target} (tokens) and,
    of a new GGUF file, {file} (its path) and {name}."""

    name: str  # as `--for` takes it
    title: str  # as its makers write it
    versions: tuple[str, ...]  # whose source was checked, the newest last
    emulate: Callable[[Mapping[str, Any], str | None], Effective]  # (settings, version)
    write: Callable[[Target, Checkpoint, str], Iterable[Settings]]  # in order of preference
    issues: tuple[Issue, ...] = ()  # besides those of issues.toml
    rank: int = 99  # its place in lists
    start: str = ""  # how it is started, or what its file holds
    file: str = ""  # what that is saved as
    reads: Literal["config.json", "gguf"] = "config.json"
    writes: Literal["command", "folder", "gguf"] = "command"
    supports: frozenset[str] = frozenset({"fixed"})  # of `target.required`
    layers: Literal["one", "full", "all"] = "one"  # which layers may get new rotations
    advice: str = ""  # the runtime whose recommendation by `extend` holds for it, if not its own
    lints: tuple[str, ...] = ()  # what `lint` shows it for by default: "config.json", "gguf"
    overrides: str = ""  # the setting at the start that replaces entries of config.json
    lengths: tuple[str, ...] = ()  # the settings at the start that limit the context
    no_settings: str = "it has no settings for these frequencies"
    other_tools: Callable[[Scheme, Scheme | None], str] = lambda scheme, own: ""
    # which of its tools computes a scheme that it can't serve, and how
    write_any: Callable[[str, Scheme | Layers, Scheme | None, Checkpoint], Settings] | None = None
    # writes what has no settings, for our own attention inside the runtime
    any_since: str = ""  # the first version that our plugin puts this attention into, if it has one
    dual_chunk: Callable[[str | None], bool] = lambda version: False  # whether a version remaps
    # positions as `dual_chunk_attention_config` says
    runner: Runner | None = None  # how `verify` runs it
    verified_as: str = ""  # the runtime whose export is run in its place

    @property
    def newest(self) -> str:
        return self.versions[-1]

    def called(self, version: str | None) -> str:
        return f"{self.title} {version or ''}".strip()


def names() -> dict[str, str]:
    """The module of each runtime. It is read off the source: help texts must not import torch."""
    found = {}
    for module in iter_modules(__path__):
        file = Path(getattr(module.module_finder, "path", "")) / f"{module.name}.py"
        match = DEFINITION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if match:
            found[match[1]] = module.name
    return found


def runtimes() -> dict[str, Runtime]:
    """All runtimes by name, in the order of their ranks."""
    modules = (import_module(f"{__name__}.{module}") for module in names().values())
    found: list[Runtime] = sorted((m.RUNTIME for m in modules), key=lambda r: (r.rank, r.name))
    return {runtime.name: runtime for runtime in found}


def recommended() -> list[Runtime]:
    """The runtimes that `extend` recommends a scheme for, each by itself."""
    return [runtime for runtime in runtimes().values() if not runtime.advice]


def ordered(version: str) -> tuple[int, ...]:
    """A version as numbers that compare; raises if it has none."""
    digits = "".join(c if c.isdigit() else " " for c in version.split("rc")[0]).split()
    if not digits:
        raise UserError(f"a version is made of numbers, as 0.32.0 or b11549, but got {version!r}.")
    return tuple(map(int, digits))


def checked_version(runtime: Runtime, version: str) -> str:
    """A version whose code is known: not of an earlier major one than the oldest that was checked,
    nor of a later minor one than the newest."""
    given, oldest, newest = map(ordered, (version, runtime.versions[0], runtime.newest))
    if given[0] < oldest[0] or given[:2] > newest[:2]:
        known = " to ".join(dict.fromkeys((runtime.versions[0], runtime.newest)))
        raise UserError(
            f"{runtime.title} was checked in {known}, and {version} may compute something else: "
            f"give a version of those, or none for the newest."
        )
    return version


def select(names: str) -> list[tuple[Runtime, str | None]]:
    """Runtimes of a text such as "vllm,transformers==4.51.3", with their versions; or "all"."""
    known = runtimes()
    if names.strip() == "all":
        return [(runtime, None) for runtime in known.values()]
    found: dict[str, tuple[Runtime, str | None]] = {}
    for text in filter(None, map(str.strip, names.split(","))):
        name, _, version = text.partition("==")
        if name not in known:
            raise UserError(
                f"no runtime is called {name!r}: use {', '.join(known)}, several joined by commas, "
                f"or all."
            )
        found[text] = known[name], checked_version(known[name], version) if version else None
    if not found:
        raise UserError(f"no runtime is named in {names!r}: use {', '.join(known)} or all.")
    return list(found.values())
