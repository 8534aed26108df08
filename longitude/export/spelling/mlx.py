"""mlx-lm: most of its models read the top-level `rope_theta` and `rope_scaling` alone, and it has
no flags for them.

YaRN's factor on cosine and sine is mscale's: 1 + 0.1 m ln s. Longrope's comes from two lengths,
√(ln M / ln L): there is no limit on length, so that L may be chosen to make it any factor from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.export.spelling.carriers import both, by_mscale, fixed
from longitude.export.spelling.value import Model, Spelling
from longitude.export.wanted import Wanted
from longitude.hf.configs.stated import ORIGINAL

TEXT = "mlx_lm.server --model {folder}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in _parameters(w, model.config):
        config = both(model, parameters, w.target)
        yield Spelling("mlx", version, config, TEXT, "mlx.sh", config)


def _parameters(w: Wanted, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from by_mscale(w, config)
    if w.attention >= 1:
        factors = fixed(w, config)
        del factors["attention_factor"], factors["factor"]
        yield factors | {ORIGINAL: w.target ** (1 / w.attention**2)}
