"""The model card of an export: what was changed, what was measured, how each runtime is started.

The header carries over what the base model's card says of licence, language and use. Its form is
the Hub's: YAML between two lines of dashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml import YAMLError, safe_load

from longitude import __version__
from longitude.core.text import parse
from longitude.inspection.catalogue import nested_parts, part_row
from longitude.runtimes.checkpoint import Opened
from longitude.runtimes.export import Export
from longitude.runtimes.learned_table import is_table
from longitude.runtimes.prior_run import Advised
from longitude.runtimes.settings import called, yaml

CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
TAGS = ("long-context", "longitude")


def card(
    opened: Opened,
    done: Sequence[Export],
    target: int,
    advice: Advised | None = None,
    proofs: Sequence[str] = (),
) -> str:
    """The text of README.md; `proofs` are sentences about what was verified."""
    title = f"# {_title(opened)} at {target:,} tokens"
    body = [title, *_what(opened, done, target), *_measured(advice), *_commands(done), *proofs]
    return f"---\n{yaml(_header(opened))}---\n\n" + "\n\n".join(body) + "\n"


def front_matter(file: Path) -> dict[str, Any]:
    """The YAML header of a card; nothing where it has none, or none that can be read."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return {}
    try:
        found = safe_load(text[4 : text.index("\n---", 3)])
    except YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _header(opened: Opened) -> dict[str, Any]:
    header = opened.model.header
    told = front_matter(opened.home / "README.md") if header is None else _of_gguf(header.keys)
    kept = {key: told[key] for key in CARRIED if told.get(key)}
    tags = [str(tag) for tag in told.get("tags") or ()]
    base = opened.source.name if opened.source.folder is None else told.get("base_model")
    # the Hub takes names of its own alone
    named = isinstance(base, list) or REPOSITORY.fullmatch(str(base or ""))
    return {
        **kept,
        **({"base_model": base} if named else {}),
        "tags": list(dict.fromkeys([*tags, *TAGS])),
    }


def _of_gguf(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file says of itself."""
    url = str(keys.get("general.base_model.0.repo_url", "")).rstrip("/")
    base = "/".join(url.split("/")[-2:])
    return {"license": keys.get("general.license"), "base_model": base}


def _title(opened: Opened) -> str:
    folder = opened.source.folder
    if folder is None:
        return opened.source.name
    return opened.source.gguf.stem if opened.source.gguf else folder.resolve().name


def _what(opened: Opened, done: Sequence[Export], target: int) -> Iterator[str]:
    schemes = dict.fromkeys(e.scheme for e in done if e.spelling)
    grown = any(is_table(parse(text)) for text in schemes)
    change = (
        "but for its table of positions, which is written out longer"
        if grown
        else "untouched; what changed is how it counts positions"
    )
    yield (
        f"The weights are those of {_title(opened)}, {change}, so that it reads {target:,} tokens"
        + (f" where it was made for {opened.trained:,}." if opened.trained else ".")
    )
    for text in schemes:
        yield f"```\n{text}\n```"
    if opened.own is not None:
        yield f"Its own scheme was `{opened.own}`."
    found = {part: None for text in schemes for part in _parts(text)}
    if found:
        yield "\n".join(f"- `{one.name}`: {one.meaning} {one.paper}." for one in found)


def _parts(text: str) -> Iterator[Any]:
    """The parts of a scheme, as the list of parts has them."""
    for part in parse(text).layer(0).parts:
        for one in nested_parts(part):
            if one.name not in ("causal", "unscaled", "sequential"):
                yield part_row(one)


def _measured(advice: Advised | None) -> Iterator[str]:
    if advice is None:
        yield (
            "## ScoreStatistics\n\nNothing was measured. `longitude extend` measures what a scheme does "
            "to a model, inside its window and past it."
        )
    elif advice.summary:
        kept = [line for line in advice.summary.splitlines() if not line.startswith("![")]
        yield "## ScoreStatistics\n\n#" + "\n".join(kept).strip().replace("\n## ", "\n### ")


def _commands(done: Sequence[Export]) -> Iterator[str]:
    yield "## Use"
    for one in done:
        if one.spelling is None:
            yield f"**{called(one.wish.runtime)}**: {one.refused}"
            continue
        name = called(one.spelling.runtime, one.spelling.version)
        fence = {".py": "python", ".sh": "sh", ".yaml": "yaml"}.get(Path(one.spelling.file).suffix)
        yield f"**{name}**\n\n```{fence or ''}\n{one.spelling.text.rstrip()}\n```"
        yield from one.spelling.notes
    yield f"Longitude {__version__} wrote this, and checked it against each runtime's formulas."
