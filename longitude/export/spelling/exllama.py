"""exllamav3: it reads config.json in either spelling, and has no flags for rotations."""

from __future__ import annotations

from collections.abc import Iterator

from longitude.export.spelling.carriers import both, either, level
from longitude.export.spelling.value import Model, Spelling
from longitude.export.spelling.versions import refuse_before
from longitude.export.wanted import Wanted

TEXT = "python examples/chat.py -m {folder} -cs {target}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    refuse_before("exllama", version, "1", "exllamav2's YaRN ramps over other lengths")
    for parameters in (*either(w, model.config), *level(w, model.config)):
        config = both(model, parameters, w.target)
        text = TEXT.replace("{target}", str(w.target))
        yield Spelling("exllama", version, config, text, "exllama.sh", config)
