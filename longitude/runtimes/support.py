"""Which runtimes can serve a scheme as it is: by their own settings, without code of ours.

What they have settings for is how fast each pair turns. Any frequencies that stay the same for
every call are a base, linear, yarn, llama3, or a list of factors (longrope in a config.json,
`rope_freqs` in a GGUF file), with a temperature beside them. Frequencies that follow the length of
a call are transformers' alone, and only dynamic NTK: vLLM and SGLang keep one table, llama.cpp has
no such type. Longrope counts as served everywhere, though servers choose between its two lists once
and not call by call. A learned table that is read further can be written out as a longer table.

No runtime has settings for remaps (llama.cpp groups positions in its command-line tools, but not in
its server), for logn, or for other slopes of ALiBi. Dual chunk attention is left out as well: vLLM
and SGLang have it for Qwen's architectures only, and a scheme does not say whose it is. Nor does it
say whether llama.cpp loads factors for the architecture (Llama and Mistral yes, Qwen and Gemma 3
no): to write a file for one runtime is where that is checked.
"""

from __future__ import annotations

import math
from dataclasses import replace

from longitude.core.part import Frequencies, by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.parts import (
    DynamicNtk,
    Hierarchical,
    Learned,
    LearnedInterpolated,
    LearnedTiled,
    LongRope,
    Proportional,
    Unscaled,
)

RUNTIMES = ("transformers", "vllm", "sglang", "llama.cpp")
OF_CHECKPOINTS = ("transformers", "vllm", "sglang")  # those that read a folder of safetensors


def serves(scheme: Scheme | Layers, own: Scheme | Layers) -> tuple[str, ...]:
    """The runtimes that serve a model, whose own scheme is `own`, under this one. Both are whole:
    what a text leaves out and a patch takes from the checkpoint stands in them."""
    count = math.lcm(len(scheme), len(own))
    changes = {(own.layer(i), scheme.layer(i)) for i in range(count)}
    if len({before for before, _ in changes}) < len(changes):
        return ()  # settings go by kinds of layers: equal ones can't be told to differ
    able = [_layer(after, before) for before, after in changes]
    return tuple(runtime for runtime in RUNTIMES if all(runtime in each for each in able))


def _layer(scheme: Scheme, own: Scheme) -> tuple[str, ...]:
    if scheme == own:
        return RUNTIMES
    if replace(scheme, embed=own.embed) == own:
        grown = isinstance(scheme.embed, Hierarchical | LearnedTiled | LearnedInterpolated)
        return OF_CHECKPOINTS if grown and isinstance(own.embed, Learned) else ()
    rope, before = scheme.rotary, own.rotary
    if rope is None or before is None or replace(scheme, rotary=before) != own:
        return ()
    if replace(rope, base=before.base, frequencies=before.frequencies) != before:
        return ()
    return _frequencies(rope.frequencies, before.frequencies)


def _frequencies(new: Frequencies, own: Frequencies) -> tuple[str, ...]:
    match new:
        case DynamicNtk():
            return ("transformers",)
        case LongRope() | Unscaled():
            return RUNTIMES
        case Proportional():  # pairs that stand still have no finite factor
            return OF_CHECKPOINTS
    fixed = not new.by_length and not by_rows(new)
    return RUNTIMES if fixed and not isinstance(own, Proportional) else ()
