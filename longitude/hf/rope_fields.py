"""A rotation as a config.json states it, before transformers has filled anything in.

transformers 5 keeps a rotation in `rope_parameters`, flat or one for each type of layer; version 4
kept it in `rope_scaling` beside `rope_theta`. What is not said stays unsaid here: `faults` judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from sys import modules
from typing import Any, TypeGuard

from longitude.core.validate import HUGE, UserError, shown

ORIGINAL = "original_max_position_embeddings"
FULL = "full_attention"  # the layers that see everything, where types of layers differ
KEYS: dict[str, set[str]] = {  # the types of transformers, and what each of them reads
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", ORIGINAL, "short_factor", "long_factor", "attention_factor"},
    "yarn": {"factor", ORIGINAL, "beta_fast", "beta_slow", "truncate"}
    | {"attention_factor", "mscale", "mscale_all_dim"},
}
THETAS = (
    "rope_theta",
    "rotary_emb_base",
    "global_rope_theta",
    "local_rope_theta",
    "rope_local_base_freq",
)
MENTIONS = ("rope_parameters", "rope_scaling", "partial_rotary_factor", "rotary_pct", *THETAS)
INSIDE = ("text_config", "thinker_config", "language_config", "llm_config", "encoder", "decoder")


@dataclass(frozen=True)
class Stated:
    """One rotation: its dictionary, and the configuration around it."""

    raw: Mapping[str, Any]  # the configuration, or the part of it that is about text
    whole: Mapping[str, Any]  # its rope_parameters or rope_scaling
    own: Mapping[str, Any]  # one layer type's dictionary in it, or all of it
    where: str

    @property
    def nested(self) -> bool:
        """Whether it is one type of layer's among several."""
        return self.own is not self.whole

    @cached_property
    def kind(self) -> str:
        """The name of its frequencies, as the model's configuration will call them."""
        stated = str(self.own.get("rope_type") or self.own.get("type") or "default")
        first = (
            stated in ("su", "yarn")
            and self.model
            and code_reads(self.model, "su", "configuration")
        )
        return "longrope" if first else stated  # what Phi-3 called it first

    @property
    def share(self) -> float:
        """The share of a head that is to turn."""
        above = [self.raw.get(key) for key in ("partial_rotary_factor", "rotary_pct")]
        found = [self.own.get("partial_rotary_factor"), *above]
        return next(filter(is_number, found), 1.0)

    @property
    def most(self) -> float | None:
        """The longest input the file allows."""
        most = self.raw.get("max_position_embeddings")
        return most if is_number(most) else None

    @property
    def head(self) -> int | None:
        """The size of a head that turns as one, if the file says it."""
        names = ("head_dim", "hidden_size", "num_attention_heads")
        head, width, heads = (n if is_number(n) else 0 for n in map(self.raw.get, names))
        found = int(head or (width // heads if heads else 0))
        return None if "qk_rope_head_dim" in self.raw else found or None

    @cached_property
    def model(self) -> type | None:
        """The class of the model's configuration, if transformers has the model."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = str(self.raw.get("model_type"))
        return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None

    def number(self, key: str) -> float | None:
        """A number of the dictionary, or of the file for want of it there."""
        value = self.own.get(key, None if self.nested else self.raw.get(key))
        return value if is_number(value) else None

    def named(self, key: str, file: str = "modeling") -> bool:
        """Whether the model's own code names this key; of an unknown model, it is taken to."""
        return self.model is None or code_reads(self.model, key, file)


def stated(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds: given its path, its folder, or that already."""
    if isinstance(source, Mapping):
        return dict(source)
    file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"no configuration can be read from {shown(str(file))} ({why}): "
            f"give the config.json of a checkpoint, or its folder."
        ) from error
    if not isinstance(held, dict):
        raise UserError(
            f"a config.json holds a dictionary, but {shown(str(file))} holds {shown(held)}: "
            f"give that of a checkpoint."
        )
    return held


def rotations(raw: Mapping[str, Any], prefix: str = "") -> Iterator[Stated]:
    """The rotations of a configuration and of the ones inside that are about text."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key)
    whole = given if isinstance(given, Mapping) else {}
    types = [t for t, own in whole.items() if isinstance(own, Mapping)]
    if types:
        yield from (Stated(raw, whole, whole[t], f"{prefix}{key}.{t}") for t in types)
    elif any(raw.get(name) is not None for name in MENTIONS):
        yield Stated(raw, whole, whole, f"{prefix}{key}")
    for name in INSIDE:
        if isinstance(raw.get(name), Mapping):
            yield from rotations(raw[name], f"{prefix}{name}.")


def flat(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary of rotary parameters; where types of layers have one each, that of the layers
    that see everything."""
    inside = [d for d in found.values() if isinstance(d, Mapping)]
    chosen = found.get(FULL) or (inside[0] if inside else None)
    return chosen if isinstance(chosen, Mapping) else found


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number, which True is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE


@lru_cache(maxsize=1024)
def code_reads(config: type, key: str, file: str = "modeling") -> bool:
    """Whether the code beside a configuration's class names a key; yes where there is none to read.

    Whether a model heeds an entry stands in no configuration, and in no list that stays true.
    """
    home = Path(getattr(modules.get(config.__module__), "__file__", None) or ".")
    code = home.parent / home.name.replace("configuration_", f"{file}_")
    if not home.name.startswith("configuration_") or not code.is_file():
        return True
    return f'"{key}"' in code.read_text(encoding="utf-8")
