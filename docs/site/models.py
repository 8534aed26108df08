"""Which encoding every known model has: the rows of `longitude inspect --all`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from typing import Any

from longitude.hf.encodings import NAMED_MODELS, Encoding, known_models


def models(page_of: Callable[[str], str | None], types: int | None = None) -> dict[str, Any]:
    """What the page tells: the named models, and every type, or so many `types`."""
    rows = known_models()
    return {
        "named": [*islice(rows, len(NAMED_MODELS))],
        "types": [*islice(rows, types)],
        "transformers": version("transformers"),
        "schemes": schemes,
        "page_of": lambda kind: page_of(kind.replace("-", "_")),
    }


def schemes(encoding: Encoding) -> list[str]:
    """The scheme, or those of layers that differ, each once."""
    return [*dict.fromkeys(what for what, _ in encoding.layers)] or (
        [encoding.scheme] if encoding.scheme else []
    )
