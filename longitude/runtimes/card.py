"""The model card of an export: what was changed, what was measured, how each runtime is started.

The header carries over what the base model's card says of licence, language and use. Its form is
the Hub's: YAML between two lines of dashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from yaml import YAMLError

from longitude import __version__
from longitude.core.text import parse
from longitude.inspection.catalogue import all_parts, distinct_layers, part_row
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.export import ExportResult, is_longer_table
from longitude.runtimes.rope_dictionaries import yaml

CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
TAGS = ("long-context", "longitude")
FENCES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}
UNMEASURED = (
    "Nothing was measured. `longitude extend` measures what a scheme does to a model, inside its "
    "window and past it."
)


def card(result: ExportResult) -> str:
    """The text of README.md."""
    source, folder = result.checkpoint.source, result.checkpoint.source.folder
    name = source.gguf.stem if source.gguf else folder.resolve().name if folder else source.name
    body = [f"# {name} at {result.target:,} tokens", *_changes(name, result)]
    if result.run is None:
        body.append(f"## Measured\n\n{UNMEASURED}")
    elif result.run.summary:
        lines = [line for line in result.run.summary.splitlines() if not line.startswith("![")]
        body.append("## Measured\n\n#" + "\n".join(lines).strip().replace("\n## ", "\n### "))
    body += ["## Use", *_commands(result), *map(str, result.verified)]
    return f"---\n{yaml(_header(result.checkpoint))}---\n\n" + "\n\n".join(body) + "\n"


def front_matter(file: Path) -> dict[str, Any]:
    """The YAML header of a card; empty if there is none that can be read."""
    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, YAMLError):
        return {}


def _header(checkpoint: Checkpoint) -> dict[str, Any]:
    header, source = checkpoint.header, checkpoint.source
    own: Mapping[str, Any] = front_matter(checkpoint.home / "README.md")
    if header is not None:
        url = str(header.keys.get("general.base_model.0.repo_url", "")).rstrip("/")
        own = {"license": header.keys.get("general.license")}
        own["base_model"] = "/".join(url.split("/")[-2:])
    carried = {key: own[key] for key in CARRIED if own.get(key)}
    base = source.name if source.folder is None else own.get("base_model")
    # the Hub takes names of its own alone
    if isinstance(base, list) or REPOSITORY.fullmatch(str(base or "")):
        carried["base_model"] = base
    return {**carried, "tags": list(dict.fromkeys([*map(str, own.get("tags") or ()), *TAGS]))}


def _changes(name: str, result: ExportResult) -> Iterator[str]:
    """What became of the weights, the schemes, the model's own one, and what their parts are."""
    checkpoint = result.checkpoint
    schemes = {e.scheme: parse(e.scheme) for e in result.exports if e.settings}
    weights = "unchanged; what changed is how it counts positions"
    if any(map(is_longer_table, schemes.values())):
        weights = "but for its table of positions, which is written out longer"
    trained = f" where it was made for {checkpoint.trained:,}" if checkpoint.trained else ""
    reads = f"so that it reads {result.target:,} tokens{trained}."
    yield f"The weights are those of {name}, {weights}, {reads}"
    yield from (f"```\n{text}\n```" for text in schemes)
    if checkpoint.own is not None:
        yield f"Its own scheme was `{checkpoint.own}`."
    parts = [p for s in schemes.values() for layer in distinct_layers(s) for p in all_parts(layer)]
    usual = ("causal", "unscaled", "sequential")
    rows = dict.fromkeys(part_row(part) for part in parts if part.name not in usual)
    if rows:
        yield "\n".join(f"- `{one.name}`: {one.meaning} {one.paper}." for one in rows)


def _commands(result: ExportResult) -> Iterator[str]:
    for one in result.exports:
        if one.settings is None:
            yield f"**{one.runtime.title}**: {one.refused}"
            continue
        fence = FENCES.get(Path(one.runtime.file).suffix, "")
        title = one.runtime.called(one.version)
        yield f"**{title}**\n\n```{fence}\n{one.settings.text.rstrip()}\n```"
        yield from one.settings.notes
    yield f"Longitude {__version__} wrote this, and checked it against each runtime's formulas."
