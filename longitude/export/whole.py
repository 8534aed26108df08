"""A whole export: for each runtime its words for the scheme, or why it has none; then the files.

What settings can't say, transformers runs with our attention: a folder that `longitude.hf.load`
opens, the scheme in its config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longitude import __version__
from longitude.export.opened import Opened
from longitude.export.serves import serves
from longitude.export.spelling import RUNTIMES, Model, Spelling, instead_of, spell
from longitude.export.spelling.transformers import dynamic
from longitude.export.spelling.versions import NEWEST, called
from longitude.export.wanted import Wanted, nearest, wanted
from longitude.fields import Mistake
from longitude.hf.configs.ropes import rope_parameters
from longitude.hf.load import SCHEME
from longitude.parts import DynamicNtk
from longitude.scheme import Layers, Scheme
from longitude.text import dump

OURS = """import longitude.hf as lh

model, tokenizer = lh.load("{folder}")

# or, on a model that your own code has loaded:
lh.apply(model, "{scheme}")
"""
OF_GGUF = ("llama.cpp", "gguf", "ollama")


@dataclass(frozen=True)
class Wish:
    """What is asked for: a scheme for a runtime."""

    runtime: str
    scheme: str  # as it was written
    version: str | None = None


@dataclass(frozen=True)
class Export:
    """What came of a wish: its words, or why there are none."""

    wish: Wish
    scheme: str  # whole
    spelling: Spelling | None
    wanted: Wanted | None = None
    refused: str | None = None


def names(text: str) -> tuple[str, ...]:
    """The runtimes of a list, as in vllm,sglang; `all` are all."""
    if text.strip() == "all":
        return RUNTIMES
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in found:
        if name not in RUNTIMES:
            raise Mistake(
                f"--for knows no runtime {name!r}: use {', '.join(RUNTIMES)}, or all of them by "
                f"all."
            )
    return found


def reach(opened: Opened, scheme: Scheme | Layers) -> int:
    """The length that a scheme itself says: its factor times what it was trained on."""
    rope = scheme.layer(0).rotary
    frequencies: Any = rope.frequencies if rope else None
    factor, trained = getattr(frequencies, "factor", None), opened.trained
    original = getattr(frequencies, "original", None) or trained
    own = opened.own.rotary if opened.own else None
    if rope is not None and rope == own and trained:
        return trained
    if not factor or not original or isinstance(frequencies, DynamicNtk):
        raise Mistake(
            f"{dump(scheme)} does not say for how many tokens it is meant: add --to, as in --to "
            f"32768 or --to 4x."
        )
    return round(factor * original)


def export(opened: Opened, wish: Wish, target: int) -> Export:
    """The words of one runtime; raises where it has none."""
    scheme = opened.scheme(wish.scheme)
    if wish.runtime == "transformers" and not _by_settings(opened, scheme):
        return Export(wish, dump(scheme), _ours(opened, wish, scheme))
    model = opened.model
    if model.header is not None and wish.runtime not in OF_GGUF:
        model = replace(model, name="{folder}")  # the one that is written for transformers
    w = _wanted(opened, model, wish, scheme, target)
    return Export(wish, dump(scheme), spell(wish.runtime, w, model, wish.version), w)


def exports(opened: Opened, wishes: Sequence[Wish], target: int) -> list[Export]:
    """What comes of several wishes: a refusal of one stops none of the others."""
    found = []
    for wish in wishes:
        try:
            found.append(export(opened, wish, target))
        except Mistake as mistake:
            found.append(Export(wish, wish.scheme, None, refused=str(mistake)))
    return found


def _wanted(
    opened: Opened, model: Model, wish: Wish, scheme: Scheme | Layers, target: int
) -> Wanted:
    """The numbers of a scheme; where it has none, the refusal names what the runtime can serve."""
    try:
        return wanted(scheme, opened.model.config, target)
    except Mistake:
        if isinstance(scheme, Layers) or scheme.rotary is None:
            raise
    near = wanted(nearest(scheme, opened.model.config, target), opened.model.config, target)
    rope = instead_of(wish.runtime, near, model, wish.version)
    instead = f"the nearest it can serve is {rope}" if rope else "it can serve no other"
    raise Mistake(f"{called(wish.runtime)} has no settings for {dump(scheme)}: {instead}.")


def _by_settings(opened: Opened, scheme: Scheme | Layers) -> bool:
    if opened.own is None or isinstance(scheme, Layers):
        return False
    rope = scheme.rotary
    fixed = rope is not None and not isinstance(rope.frequencies, DynamicNtk)
    return fixed and "transformers" in serves(scheme, opened.own)


def _ours(opened: Opened, wish: Wish, scheme: Scheme | Layers) -> Spelling:
    """A config.json with the scheme in it, for `longitude.hf.load`."""
    version = wish.version or NEWEST["transformers"]
    entry: dict[str, Any] = {"scheme": wish.scheme, "version": __version__}
    config = dict(opened.model.config)
    text = OURS.replace("{scheme}", wish.scheme.replace('"', '\\"'))
    rope, own = scheme.layer(0).rotary, opened.own.rotary if opened.own else None
    known = opened.own is not None and "transformers" in serves(scheme, opened.own)
    if known and rope and own and isinstance(rope.frequencies, DynamicNtk):
        stock = dynamic(opened.model, rope_parameters(rope), rope.frequencies.original, version)
        entry["rope_parameters"] = rope_parameters(own)
        config = {**(stock.config or {}), SCHEME: entry}
        return replace(stock, config=config, text=text)
    notes = ("stock transformers reads this folder as the model was before: load it as shown.",)
    config[SCHEME] = entry
    return Spelling("transformers", version, config, text, "load.py", config, notes)
