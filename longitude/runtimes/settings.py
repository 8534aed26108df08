"""What an export starts from and what it comes to: the files of a model, and one runtime's words
for a scheme.

Versions of runtimes: the newest whose source these settings were checked against.
llama.cpp numbers its builds, b11549.

Settings as the text of a YAML file, a dictionary or list of numbers on one line where it fits.

PyYAML comes with transformers. It writes the point that it wants in numbers with an exponent,
1.0e-06, which JSON would leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yaml import safe_dump

from longitude.core.validate import UserError
from longitude.hf.gguf_reader import Header
from longitude.runtimes.effective import before

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


NEWEST = {
    "transformers": "5.22.2",
    "vllm": "0.32.0",
    "sglang": "0.5.23",
    "llama.cpp": "b11549",
    "gguf": "b11549",
    "ollama": "0.33",
    "mlx": "0.32.2",
    "exllama": "1.6.5",
    "tensorrt-llm": "1.2",
    "axolotl": "0.19",
    "torchtitan": "0.3",
}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp (GGUF)", "ollama": "Ollama"}
NAMES |= {"mlx": "mlx-lm", "exllama": "exllama", "tensorrt-llm": "TensorRT-LLM"}


def called(runtime: str, version: str = "") -> str:
    """A runtime as its makers write it, with its version."""
    return f"{NAMES.get(runtime, runtime)} {version}".strip()


def refuse_before(runtime: str, version: str, first: str, why: str) -> None:
    """Raise for versions that have no settings to spell a scheme in."""
    if before(version, first):
        raise UserError(
            f"{called(runtime, version)} can't be told a scheme ({why}): use {first} or newer."
        )


def yaml(entries: Mapping[str, Any]) -> str:
    """A mapping, in its own order."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return safe_dump(dict(entries), default_flow_style=None, **style)
