"""What `longitude read` was asked, and the mistakes that can be told from that alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.reading.select import AUTO, known

DEFAULT = "tiny-rope"


@dataclass(frozen=True)
class Asked:
    """The options, as they were given."""

    files: tuple[str, ...]
    question: str
    model: str | None
    by: str
    show: bool
    max_tokens: int
    temperature: float
    seed: int | None
    window: int | None
    most_windows: int | None
    runs: Path
    out: Path
    key: str | None
    quiet: bool
    as_json: bool
    load: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name or address."""
        return DEFAULT if self.model is None else self.model

    @property
    def server(self) -> bool:
        """Whether the model is behind a server."""
        return self.name.startswith(("http://", "https://"))

    @property
    def silent(self) -> bool:
        """Whether nothing but the answer, or data, is to be said."""
        return self.quiet or self.as_json


def check(asked: Asked) -> None:
    """Mistakes that can be told before anything is read or loaded."""
    from longitude.hf.generation import Sampling

    known(asked.by)
    if not asked.question.strip():
        raise UserError("the question is empty: ask something with --question.")
    try:
        asked.question.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the question {shown(asked.question)} is not UTF-8: write it so."
        ) from None
    if asked.max_tokens < 1:
        raise UserError(f"--max-tokens is 1 or more, but got {asked.max_tokens}: use 64.")
    if asked.window is not None and asked.window < 1:
        raise UserError(f"--window is 1 token or more, but got {asked.window}: leave it out.")
    if asked.most_windows is not None and asked.most_windows < 0:
        raise UserError(f"--most-windows is 0 (all) or more, but got {asked.most_windows}: use 32.")
    if asked.quiet and asked.show:
        raise UserError("--quiet is the answer alone, and --show is more: leave one of them out.")
    Sampling(asked.temperature, 1.0, asked.seed)
    if asked.server and asked.by not in (AUTO, "memwalker"):
        raise UserError(
            f"--by {asked.by} needs a model's own numbers, but {shown(asked.name)} is a server, "
            f"which only talks: use --by memwalker, or a checkpoint."
        )
