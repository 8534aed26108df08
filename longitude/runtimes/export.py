"""A whole export: for each runtime its words for the scheme, or why it has none; then the files.

What settings can't say, transformers runs with our attention: a folder that `longitude.hf.loading`
opens, the scheme in its config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longitude import __version__
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.hf.rope_config import rope_parameters
from longitude.hf.source import SCHEME
from longitude.parts import DynamicNtk
from longitude.runtimes.checkpoint import Opened
from longitude.runtimes.learned_table import WORDS, is_table, table
from longitude.runtimes.settings import NEWEST, Model, Spelling, called
from longitude.runtimes.support import serves
from longitude.runtimes.target import Wanted, nearest, wanted
from longitude.runtimes.transformers import dynamic
from longitude.runtimes.write import RUNTIMES, nearest_served, spell

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
            raise UserError(
                f"--for knows no runtime {name!r}: use {', '.join(RUNTIMES)}, or all of them by "
                f"all."
            )
    if not found:
        raise UserError(f"--for names no runtime: use {', '.join(RUNTIMES)} or all, not {text!r}.")
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
        raise UserError(
            f"{dump(scheme)} does not say for how many tokens it is meant: add --to, as in --to "
            f"32768 or --to 4x."
        )
    return round(factor * original)


def export(opened: Opened, wish: Wish, target: int) -> Export:
    """The words of one runtime; raises where it has none."""
    scheme, own, model, moved = opened.asked(wish.scheme)
    if own is None and wish.runtime in WORDS and is_table(scheme):
        return Export(wish, dump(scheme), table(wish.runtime, model, target, wish.version))
    if wish.runtime == "transformers" and not _by_settings(scheme, own):
        return Export(wish, dump(scheme), _ours(opened, wish, scheme, own))
    if moved and wish.runtime != "transformers":
        raise UserError(
            f"{called(wish.runtime)} can be told how layers turn that see everything, but "
            f"{wish.scheme} turns others anew as well: write layers(…) with a plain rope() for "
            f"those."
        )
    if opened.apart is not None and wish.runtime not in OF_GGUF:
        model = replace(model, name="{folder}")  # the one that is written for transformers
    w = _wanted(opened, model, wish, scheme, target)
    return Export(wish, dump(scheme), spell(wish.runtime, w, model, wish.version), w)


def exports(opened: Opened, wishes: Sequence[Wish], target: int) -> list[Export]:
    """What comes of several wishes: a refusal of one stops none of the others."""
    found = []
    for wish in wishes:
        try:
            _check_kind(opened, wish, wishes)
            found.append(export(opened, wish, target))
        except UserError as mistake:
            found.append(Export(wish, wish.scheme, None, refused=str(mistake)))
    return found


def _check_kind(opened: Opened, wish: Wish, wishes: Sequence[Wish]) -> None:
    """Raise for what reads folders, where the model is none and no folder is made of it."""
    if opened.source.adapter is not None and wish.runtime in OF_GGUF:
        raise UserError(
            f"{called(wish.runtime)} reads a GGUF file, but got an adapter: write it --for "
            f"transformers, which merges it, and convert that folder."
        )
    made = ("transformers", "mlx", "exllama", *OF_GGUF)  # these make one, or read none
    if opened.apart is None or wish.runtime in made:
        return
    if not any(other.runtime == "transformers" for other in wishes):
        raise UserError(
            f"{called(wish.runtime)} reads a checkpoint's folder, but got {opened.apart}: add "
            f"transformers to --for, which makes a folder of it."
        )


def _wanted(
    opened: Opened, model: Model, wish: Wish, scheme: Scheme | Layers, target: int
) -> Wanted:
    """The numbers of a scheme; where it has none, the refusal names what the runtime can serve."""
    try:
        return wanted(scheme, opened.model.config, target)
    except UserError:
        if isinstance(scheme, Layers) or scheme.rotary is None:
            raise
    near = wanted(nearest(scheme, opened.model.config, target), opened.model.config, target)
    instead = nearest_served(wish.runtime, near, model, wish.version)
    raise UserError(f"{called(wish.runtime)} has no settings for {dump(scheme)}: {instead}.")


def _by_settings(scheme: Scheme | Layers, own: Scheme | None) -> bool:
    if own is None or scheme.layer(0).rotary is None:
        return False
    return "transformers" in serves(scheme, own) and not _dynamic(scheme)


def _dynamic(scheme: Scheme | Layers) -> DynamicNtk | None:
    rope = scheme.layer(0).rotary
    return rope.frequencies if rope and isinstance(rope.frequencies, DynamicNtk) else None


def _ours(opened: Opened, wish: Wish, scheme: Scheme | Layers, own: Scheme | None) -> Spelling:
    """A config.json with the scheme in it, for `longitude.hf.loading`; dynamic NTK, which
    transformers has a name for, in its words too."""
    version = wish.version or NEWEST["transformers"]
    entry: dict[str, Any] = {"scheme": wish.scheme, "version": __version__}
    text = OURS.replace("{scheme}", wish.scheme.replace('"', '\\"'))
    rope, before = scheme.layer(0).rotary, own.rotary if own else None
    found = _dynamic(scheme)
    if found and rope and own and before and "transformers" in serves(scheme, own):
        stock = dynamic(opened.model, rope_parameters(rope), found.original, version)
        entry["rope_parameters"] = rope_parameters(before)
        return replace(stock, config={**(stock.config or {}), SCHEME: entry}, text=text)
    notes = ("stock transformers reads this folder as the model was before: load it as shown.",)
    config = {**opened.model.config, SCHEME: entry}
    return Spelling("transformers", version, config, text, "load.py", config, notes)
