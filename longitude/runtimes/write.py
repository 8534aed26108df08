"""Which way of saying a scheme a runtime takes: the first that its own formulas make it of.

`effective` computes what a runtime would do with each; where none gives the scheme's frequencies,
its factor and its length, the export is refused with what differs and the nearest scheme that the
runtime can serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from longitude.core.validate import UserError, shown
from longitude.parts import Linear, LongRope, Ntk, Rope, Yarn
from longitude.runtimes import (
    axolotl,
    exllama,
    gguf,
    mlx,
    ollama,
    sglang,
    tensorrt_llm,
    torchtitan,
    transformers,
    vllm,
)
from longitude.runtimes import llama_cpp_flags as llamacpp
from longitude.runtimes.effective import Effective
from longitude.runtimes.emulate import effective
from longitude.runtimes.rope_dictionaries import theta
from longitude.runtimes.settings import NEWEST, Model, Spelling, called
from longitude.runtimes.target import Wanted

Ways = Callable[[Wanted, Model, str], Iterator[Spelling]]
WAYS: dict[str, Ways] = {
    "transformers": transformers.spellings,
    "vllm": vllm.spellings,
    "sglang": sglang.spellings,
    "llama.cpp": llamacpp.spellings,
    "gguf": gguf.spellings,
    "ollama": ollama.spellings,
    "mlx": mlx.spellings,
    "exllama": exllama.spellings,
    "tensorrt-llm": tensorrt_llm.spellings,
    "axolotl": axolotl.spellings,
    "torchtitan": torchtitan.spellings,
}
RUNTIMES = tuple(WAYS)
LAYERED = ("transformers", "vllm")  # which are told the rotation of each type of layer
WORDLESS = {"llama.cpp": "its flags have no words for it, a file by --for gguf may"}
CLOSE = 1e-6  # relative: float32 has 6e-8, and a GGUF file's numbers are float32


def spell(runtime: str, w: Wanted, model: Model, version: str | None = None) -> Spelling:
    """A scheme for a runtime, as its own code computes it; raises where it has no words for it."""
    if runtime not in WAYS:
        raise UserError(
            f"no runtime is called {shown(runtime)}: use {', '.join(RUNTIMES[:-1])} or "
            f"{RUNTIMES[-1]}."
        )
    newest = version or NEWEST[runtime]
    if model.kinds and runtime not in LAYERED:
        raise UserError(
            f"{called(runtime)} is told one rotation, but types of layers turn differently in this "
            f"model: export it for {' or '.join(LAYERED)}."
        )
    found, why = _first(runtime, w, model, newest)
    if found is not None:
        return found
    near = nearest_served(runtime, w, model, newest)
    raise UserError(f"{called(runtime, newest)} can't serve {w.rope} ({why}): {near}.")


def _first(runtime: str, w: Wanted, model: Model, version: str) -> tuple[Spelling | None, str]:
    """The first way that says it, or else what the last one comes to."""
    why = WORDLESS.get(runtime, "it has no words for these frequencies")
    for spelling in WAYS[runtime](w, model, version):
        missed = difference(effective(runtime, spelling.settings, version), w)
        if missed is None:
            return spelling, ""
        why = missed
    return None, why


def difference(found: Effective, w: Wanted) -> str | None:
    """What a runtime computes other than it should, in words; None where nothing."""
    if len(found.inv_freq) != len(w.inv_freq):
        pairs = f"{len(found.inv_freq)} pairs and not {len(w.inv_freq)}"
        return f"it would turn {pairs}" if found.inv_freq else "it would not start"
    both = zip(found.inv_freq, w.inv_freq, strict=True)
    worst = max((abs(a - b) / b if b else abs(a) for a, b in both), default=0.0)
    if worst > CLOSE:
        return f"a frequency would be off by {worst:.1%}"
    if not math.isclose(found.attention, w.attention, rel_tol=CLOSE):
        return f"cosine and sine would be scaled by {found.attention:.4f} and not {w.attention:.4f}"
    if found.length < w.target:
        return f"it would read {found.length:,} tokens and not {w.target:,}"
    return None


def nearest_served(runtime: str, w: Wanted, model: Model, version: str | None = None) -> str:
    """The rotation, or the first of the simpler ones, that the runtime can serve: in the words that
    end a refusal."""
    for rope in (w.rope, *_simpler(w)):
        one = _wanted(rope, w)
        if _first(runtime, one, model, version or NEWEST[runtime])[0] is not None:
            fixed = f", which is a rope_theta of {theta(one):.6g}" * isinstance(
                rope.frequencies, Ntk
            )
            return f"the nearest it can serve is {rope}{fixed}"
    return "it can serve no other"


def _simpler(w: Wanted) -> Iterator[Rope]:
    f, factor = w.rope.frequencies, max(1.0, w.target / w.original)
    if isinstance(f, Yarn):
        for gain in (None, 1.0):
            yield replace(w.rope, frequencies=replace(f, attention_factor=gain, mscale=None))
    if isinstance(f, LongRope):
        yield replace(w.rope, frequencies=replace(f, short=f.long, attention_factor=1.0))
    for other in (Yarn(factor, original=w.original), Ntk(factor), Linear(factor)):
        yield replace(w.rope, frequencies=other)


def _wanted(rope: Rope, w: Wanted) -> Wanted:
    f = rope.frequencies
    return replace(
        w,
        rope=rope,
        inv_freq=tuple(f.inv_freq(w.dims, rope.base, w.target).tolist()),
        attention=math.sqrt(f.gain(w.target)),
    )
