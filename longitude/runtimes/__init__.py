"""What inference and training runtimes compute from a model's settings, and how a scheme is written
for each of them.

A runtime is one module in this folder. It defines `RUNTIME = Runtime(name="…", …)` with `emulate`
(what the runtime's own code computes from given settings) and `write` (settings for a scheme). The
known issues that explain a difference are in issues.toml or in the runtime's own module. Every
command discovers runtimes by scanning this folder (`runtimes()`); there is no list to extend.
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
    """A known way in which what a runtime computes differs from what its settings suggest."""

    name: str
    affects: str  # any of "frequencies", "attention", "length", "remap" and "start", separated by
    # spaces; empty for a mere note
    sentence: str
    fix: str


@dataclass(frozen=True)
class Settings:
    """A scheme written as the settings of one runtime."""

    entries: Mapping[str, Any]  # as `emulate` reads them
    text: str = ""  # the command or file contents; if empty, the runtime's `start`
    config: Mapping[str, Any] | None = None  # config.json of the new folder, if there is one
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # further files of that folder


Question = Mapping[str, Any]
TopTokens = list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Runner:
    """How to run a runtime on this machine, so that what it computes can be compared.

    `top_tokens` receives `path` (a folder, a name on the Hub or a GGUF file), `settings` (as
    `emulate` reads them), `ids`, `lengths`, `length` (the length to serve), `top`, `threads` and
    `drawn` (the token to generate, for runtimes that must generate one). For each n in `lengths` it
    returns the `top` most likely tokens after the first n ids, with their log-probabilities. It
    computes in float32, so that only settings can cause a difference.
    """

    module: str  # importable if the runtime is installed
    install: str  # what to `pip install` otherwise
    top_tokens: Callable[[Question], TopTokens]


def in_process(*command: str, question: Question) -> TopTokens:
    """Return the answer of a Python program, run as a subprocess to isolate a runtime's output and
    aborts. It reads the question as JSON, and prints the answer as its last line."""
    payload = json.dumps(question)
    done = subprocess.run([sys.executable, *command], input=payload, capture_output=True, text=True)
    if done.returncode == 0:
        with suppress(ValueError, IndexError):
            return json.loads(done.stdout.splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    errors = (line for mark in ("error:", "error") for line in lines if mark in line.lower())
    raise RuntimeError(next(errors, lines[-1]))


@dataclass(frozen=True)
class Runtime:
    """Everything the commands know about one runtime. Texts may contain {folder}, {target} (in
    tokens) and, for a new GGUF file, {file} (its path) and {name}."""

    name: str  # as `--for` takes it
    title: str  # as its developers write it
    versions: tuple[str, ...]  # those whose source was checked, the newest last
    emulate: Callable[[Mapping[str, Any], str | None], Effective]  # (settings, version)
    write: Callable[[Target, Checkpoint, str], Iterable[Settings]]  # candidates, the best first
    issues: tuple[Issue, ...] = ()  # besides those of issues.toml
    rank: int = 99  # its position in lists
    start: str = ""  # the command that starts it, or the contents of its file
    file: str = ""  # the name of the file that this is saved to
    reads: Literal["config.json", "gguf"] = "config.json"
    writes: Literal["command", "folder", "gguf"] = "command"
    supports: frozenset[str] = frozenset({"fixed"})  # of what `target.required` returns
    layers: Literal["one", "full", "all"] = "one"  # which layers may get new rotations
    advice: str = ""  # the runtime whose `extend` recommendation applies to it, if not its own
    lints: tuple[str, ...] = ()  # formats that `lint` shows it for: "config.json", "gguf"
    overrides: str = ""  # the start option that overrides entries of config.json
    lengths: tuple[str, ...] = ()  # the start options that limit the context
    no_settings: str = "it has no settings for these frequencies"
    other_tools: Callable[[Scheme, Scheme | None], str] = lambda scheme, own: ""
    # names another of its tools that computes a scheme which it can't serve, and the flags for it
    write_any: Callable[[str, Scheme | Layers, Scheme | None, Checkpoint], Settings] | None = None
    # writes schemes that have no settings, to be run by our own attention inside the runtime
    any_since: str = ""  # the first version that our plugin supports, if there is a plugin
    dual_chunk: Callable[[str | None], bool] = lambda version: False  # whether a version remaps
    # positions according to `dual_chunk_attention_config`
    runner: Runner | None = None  # how `verify` runs it
    verified_as: str = ""  # the runtime that `verify` exports for and runs in its place

    @property
    def newest(self) -> str:
        return self.versions[-1]

    def called(self, version: str | None) -> str:
        return f"{self.title} {version or ''}".strip()


def names() -> dict[str, str]:
    """Map runtimes to modules. Parses the source, because help texts must not import torch."""
    modules = {}
    for module in iter_modules(__path__):
        file = Path(getattr(module.module_finder, "path", "")) / f"{module.name}.py"
        match = DEFINITION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if match:
            modules[match[1]] = module.name
    return modules


def runtimes() -> dict[str, Runtime]:
    """All runtimes by name, in the order of their ranks."""
    modules = (import_module(f"{__name__}.{module}") for module in names().values())
    by_rank: list[Runtime] = sorted((m.RUNTIME for m in modules), key=lambda r: (r.rank, r.name))
    return {runtime.name: runtime for runtime in by_rank}


def recommended() -> list[Runtime]:
    """The runtimes for which `extend` makes a recommendation of their own."""
    return [runtime for runtime in runtimes().values() if not runtime.advice]


def ordered(version: str) -> tuple[int, ...]:
    """Convert a version to numbers that can be compared; raises if it has none."""
    digits = "".join(c if c.isdigit() else " " for c in version.split("rc")[0]).split()
    if not digits:
        raise UserError(f"a version is made of numbers, as 0.32.0 or b11549, but got {version!r}.")
    return tuple(map(int, digits))


def checked_version(runtime: Runtime, version: str) -> str:
    """Return `version` if its code is known. Raises if its major version is older than the oldest
    that was checked, or its minor version newer than the newest."""
    requested, oldest, newest = map(ordered, (version, runtime.versions[0], runtime.newest))
    if requested[0] < oldest[0] or requested[:2] > newest[:2]:
        known = " to ".join(dict.fromkeys((runtime.versions[0], runtime.newest)))
        raise UserError(
            f"{runtime.title} was checked in {known}, and {version} may compute something else: "
            f"give a version of those, or none for the newest."
        )
    return version


def select(names: str) -> list[tuple[Runtime, str | None]]:
    """Parse "all" or a list such as "vllm,transformers==4.51.3" into runtimes and versions."""
    known = runtimes()
    if names.strip() == "all":
        return [(runtime, None) for runtime in known.values()]
    selected: dict[str, tuple[Runtime, str | None]] = {}
    for text in filter(None, map(str.strip, names.split(","))):
        name, _, version = text.partition("==")
        if name not in known:
            raise UserError(
                f"no runtime is called {name!r}: use {', '.join(known)}, several joined by commas, "
                f"or all."
            )
        selected[text] = known[name], checked_version(known[name], version) if version else None
    if not selected:
        raise UserError(f"no runtime is named in {names!r}: use {', '.join(known)} or all.")
    return list(selected.values())
