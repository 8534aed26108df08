"""transformers: a config.json in both spellings, which a folder is written around.

`rope_parameters` is version 5's, `rope_theta` and `rope_scaling` version 4's. Versions about 4.51
take YaRN's factor from max_position_embeddings / original, so that the first is the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from longitude.export.spelling.carriers import both, either
from longitude.export.spelling.value import TOKENIZER, Model, Spelling
from longitude.export.wanted import Wanted
from longitude.parts import Yarn

TEXT = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in either(w, model.config):
        config = both(model, parameters, w.target)
        settings = config | {TOKENIZER: dict(model.tokenizer) | {"model_max_length": w.target}}
        yield Spelling("transformers", version, settings, TEXT, "load.py", config, _ratio(w))


def _ratio(w: Wanted) -> tuple[str, ...]:
    """What versions that take YaRN's factor from two lengths would make of others."""
    f = w.rope.frequencies
    if not isinstance(f, Yarn) or f.factor * f.original == w.target:
        return ()
    return (
        f"transformers about 4.51 takes {w.target / f.original:g} for YaRN's factor, not "
        f"{f.factor:g}: export with --to {f.factor * f.original:.0f} for those.",
    )


def dynamic(model: Model, parameters: dict[str, object], original: int, version: str) -> Spelling:
    """Dynamic NTK, which begins at max_position_embeddings, whatever else is said."""
    config = both(model, parameters, original)
    note = (
        "transformers turns new keys by a larger base and keeps the old ones: what it decodes "
        "differs from what it prefills; longitude.hf.load with the scheme does not."
    )
    spelling = Spelling("transformers", version, config, TEXT, "load.py", config)
    return replace(spelling, notes=(note,))
