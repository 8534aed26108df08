"""llama.cpp's flags, for a GGUF file that stays as it is.

They know linear and yarn, with betas, and a base; a factor on cosine and sine goes in as a key of
the header (`--override-kv`), since `--yarn-attn-factor` does nothing from b7394 on. Frequencies
that need a tensor, and files that have one, need a new file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from longitude.parts import Linear, Yarn
from longitude.runtimes.gguf import header_of_gguf as header_of
from longitude.runtimes.rope_dictionaries import kind, theta, usual_gain
from longitude.runtimes.settings import Model, Spelling
from longitude.runtimes.target import Wanted


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By flags, where there are any."""
    header = header_of("llama.cpp", model)
    flags = _flags(w)
    if flags is None or header.divisors:
        return
    name = header.keys["general.architecture"]
    over: dict[str, Any] = {f"{name}.context_length": w.target}
    gain = w.attention / usual_gain(w)
    if abs(gain - 1) > 1e-9:
        over[f"{name}.rope.scaling.attn_factor"] = gain
    flags = {"-c": w.target, "--rope-freq-base": theta(w), **flags}
    settings = {**header.keys, **over, **flags}
    words = [str(word) for pair in flags.items() for word in pair]
    told = ",".join(f"{key}={_typed(value)}" for key, value in over.items())
    line = ["llama-server", "-m", model.name, *words, "--override-kv", told]
    yield Spelling("llama.cpp", version, settings, shlex.join(line) + "\n", "llama.cpp.sh")


def _flags(w: Wanted) -> dict[str, Any] | None:
    f = w.rope.frequencies
    match kind(w):
        case "plain":
            return {"--rope-scaling": "none"}
        case "linear" if isinstance(f, Linear):
            return {"--rope-scaling": "linear", "--rope-scale": float(f.factor)}
        case "yarn" if isinstance(f, Yarn):
            flags = {"--rope-scaling": "yarn", "--rope-scale": float(f.factor)}
            betas = {"--yarn-beta-fast": float(f.fast), "--yarn-beta-slow": float(f.slow)}
            return flags | {"--yarn-orig-ctx": f.original} | betas
    return None


def _typed(value: float) -> str:
    return f"int:{value}" if isinstance(value, int) else f"float:{value}"
