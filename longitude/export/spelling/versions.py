"""Versions of runtimes: the newest whose source these settings were checked against.
llama.cpp numbers its builds, b11549."""

from __future__ import annotations

from longitude.export.effective.value import before
from longitude.fields import Mistake

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
        raise Mistake(
            f"{called(runtime, version)} can't be told a scheme ({why}): use {first} or newer."
        )
