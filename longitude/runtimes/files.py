"""The files of an export: folders for what reads folders, a new GGUF file, commands as scripts.

With one runtime everything lies in the folder itself; with several, each that needs a folder has
one of its own inside, and those that would be the same are one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from longitude.core.atomic_io import atomic_file
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.runtimes.card import card
from longitude.runtimes.checkpoint import Opened
from longitude.runtimes.export import Export, Wish, exports
from longitude.runtimes.folder import Contents, write_folder
from longitude.runtimes.gguf import export_gguf
from longitude.runtimes.learned_table import is_table
from longitude.runtimes.prior_run import Advised
from longitude.runtimes.settings import Model

GGUF = ("gguf", "ollama")
SERVERS = ("vllm", "sglang")


def slug(name: str) -> str:
    """A model's name as a file's."""
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def located(opened: Opened, done: Sequence[Export], out: Path, target: int) -> list[Export]:
    """Exports whose words name the folder and the file that will be written."""
    stock = next((_home(e, done, out) for e in done if e.wish.runtime == "transformers"), None)
    found = []
    for one in done:
        spelling = one.spelling
        if spelling is not None:
            folder = _home(one, done, out) if spelling.config is not None else stock or out
            text = spelling.text.replace("{folder}", str(folder))
            text = text.replace("{file}", _model_file(opened, one, out, target))
            spelling = replace(spelling, text=text)
        found.append(replace(one, spelling=spelling))
    return found


def write(
    opened: Opened,
    done: Sequence[Export],
    out: Path,
    target: int,
    weights: str = "link",
    advice: Advised | None = None,
) -> list[Path]:
    """Write what was exported; the paths of what is new. The exports are `located` already."""
    shown_too = [*done, *_companions(opened, done, out, target)]
    text, made = card(opened, shown_too, target, advice), list[Path]()
    for one in (e for e in done if e.spelling is not None):
        for path in _written(opened, one, done, out, target, weights, text):
            made += [] if path in made else [path]
    return made


def write_card(
    opened: Opened,
    done: Sequence[Export],
    out: Path,
    target: int,
    advice: Advised | None = None,
    proofs: Sequence[str] = (),
) -> Path:
    """Write the card of all exports, with what was verified of them."""
    return _text_file(out / "README.md", card(opened, done, target, advice, proofs))


def _companions(opened: Opened, done: Sequence[Export], out: Path, target: int) -> list[Export]:
    """How servers are started on a folder that is written for transformers alone: for its card."""
    one = done[0]
    if len(done) > 1 or one.spelling is None or one.wanted is None or one.spelling.config is None:
        return []
    if one.wish.runtime != "transformers":
        return []
    folder = Model(str(out), one.spelling.config, {"model_max_length": target})
    wishes = [Wish(server, one.wish.scheme) for server in SERVERS]
    found = exports(replace(opened, model=folder), wishes, target)
    return [e for e in found if e.spelling is not None]


def _written(
    opened: Opened,
    one: Export,
    done: Sequence[Export],
    out: Path,
    target: int,
    weights: str,
    text: str,
) -> list[Path]:
    assert one.spelling is not None
    spelling = one.spelling
    if spelling.config is not None:
        home = _home(one, done, out)
        if home == _home(next(e for e in done if _same(e, one)), done, out) and _first(one, done):
            grown = one.scheme if is_table(parse(one.scheme)) else None
            beside = {spelling.file: spelling.text}
            contents = Contents(spelling.config, target, text, beside, grown)
            write_folder(opened, home, contents, weights)
        return [home]
    made = [_text_file(out / spelling.file, spelling.text)]
    if one.wish.runtime in GGUF and one.wanted is not None and opened.source.gguf is not None:
        file = out / gguf_name(opened, target)
        if _first_gguf(one, done):
            export_gguf(opened.source.gguf, file, one.wanted)
        made.append(file)
    return made


def gguf_name(opened: Opened, target: int) -> str:
    """What the new GGUF file is called: the old one's name with the length behind it."""
    return f"{slug(opened.model.name)}-{target}.gguf"


def _model_file(opened: Opened, one: Export, out: Path, target: int) -> str:
    name = gguf_name(opened, target)
    return name if one.wish.runtime == "ollama" else str(out / name)


def _home(one: Export, done: Sequence[Export], out: Path) -> Path:
    """The folder of an export: its own, or that of an earlier one with the same config.json."""
    first = next((e for e in done if _same(e, one)), one)
    return out if len(done) == 1 else out / first.wish.runtime


def _same(a: Export, b: Export) -> bool:
    one, two = (e.spelling.config if e.spelling else None for e in (a, b))
    return one is not None and json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def _first(one: Export, done: Sequence[Export]) -> bool:
    return next(e for e in done if _same(e, one)) is one


def _first_gguf(one: Export, done: Sequence[Export]) -> bool:
    return next(e for e in done if e.spelling and e.wish.runtime in GGUF) is one


def _text_file(path: Path, text: str) -> Path:
    """Write a file beside its place and put it there."""
    try:
        with atomic_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{shown(str(path))} can't be written ({error.strerror or error}): name another folder."
        ) from error
    return path
