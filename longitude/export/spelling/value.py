"""What an export starts from and what it comes to: the files of a model, and one runtime's words
for a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longitude.hf.loading.gguf import Header

Entries = dict[str, Any]
TOKENIZER = "tokenizer_config.json"  # its key among the settings that `effective` reads


@dataclass(frozen=True)
class Model:
    """A checkpoint, as far as its settings go: nothing of its weights."""

    name: str  # as commands call it
    config: Mapping[str, Any]  # config.json, or the same told from the header of a GGUF file
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    header: Header | None = None  # of a GGUF file
    kinds: Mapping[str, Entries] = field(default_factory=dict)  # where types of layers differ: the
    # rotations of all but those that see everything

    @property
    def limit(self) -> int | None:
        """The longest input of its tokenizer, if it has one: placeholders of 1e30 are none."""
        most = self.tokenizer.get("model_max_length")
        return int(most) if isinstance(most, int | float) and most < 1e9 else None


@dataclass(frozen=True)
class Spelling:
    """A scheme in the words of one version of one runtime."""

    runtime: str
    version: str
    settings: Mapping[str, Any]  # as `longitude.export.effective` reads them
    text: str  # the command to type, or what the file says
    file: str = ""  # what the text is kept as
    config: Mapping[str, Any] | None = None  # a config.json of its own, where it reads nothing else
    notes: tuple[str, ...] = ()
