"""Adapters that carry their positions with them.

peft keeps the matrices of LoRA (Hu et al. 2021, arXiv:2106.09685: W + (α/r) B A) and no word of the
rotation they were trained under: on the base as it is they would turn by other angles. So
longitude.json lies beside adapter_config.json: the scheme, the base by name and by some of its
numbers (an adapter fits any model of its shape, and ruins all but one), and the table of positions,
where it was grown before training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError, short

ADAPTER_JSON, LONGITUDE_JSON = "adapter_config.json", "longitude.json"
TENSORS, NUMBERS = 16, 8  # of the base that are written down
Sample = dict[str, list[float]]


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder: the base it names, and what longitude.json says, if it is there."""

    folder: Path
    base: str
    revision: str | None = None
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any] | None:
        """The scheme as `save` would write it into config.json."""
        known = ("scheme", "version", "length", "force", "target")
        found = {key: self.held[key] for key in known if key in self.held}
        return found if isinstance(found.get("scheme"), str) else None


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / ADAPTER_JSON).is_file() and not (folder / "config.json").is_file()


def read_adapter(folder: Path, base: str | None = None) -> Adapter:
    """What an adapter's folder says; `base` where that was moved."""
    peft, ours = _json(folder / ADAPTER_JSON), folder / LONGITUDE_JSON
    held = _json(ours) if ours.is_file() else {}
    about = held.get("base") or {}
    named = base or about.get("name") or peft.get("base_model_name_or_path")
    if not isinstance(named, str):
        file = folder / ADAPTER_JSON
        raise UserError(f"{file} names no base model: add base_model_name_or_path.")
    return Adapter(folder, named, None if base else about.get("revision"), held)


def check_peft(why: str) -> None:
    """Raise unless peft is installed."""
    if find_spec("peft") is None:
        raise UserError(f"{why} needs the package peft: pip install longitude[tune].")


def merged(model: Any, adapter: Adapter) -> Any:
    """The base with an adapter's matrices added in; raises where it is another base."""
    check_peft(f"the adapter {short(str(adapter.folder))}")
    from peft import PeftModel

    check_base(model, adapter)
    base = _grown(model, adapter)
    try:
        whole = PeftModel.from_pretrained(base, str(adapter.folder)).merge_and_unload()
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        said = short(" ".join(str(error).split()), 120).rstrip(".")
        raise UserError(
            f"the adapter {adapter.folder} does not fit {adapter.base} ({said}): give the base it "
            "was made for."
        ) from error
    whole.requires_grad_(False)
    return whole.eval()


def check_base(model: nn.Module, adapter: Adapter) -> None:
    """Raise unless a model has the numbers of the base that an adapter was trained on."""
    about = adapter.held.get("base") or {}
    kept, named = about.get("sample"), about.get("name", adapter.base)
    if not kept:
        return
    held = {name: p for name, p in model.named_parameters() if name in kept}
    coarse = max(_eps(p.dtype) for p in model.parameters())
    coarse = max(coarse, _eps(getattr(torch, str(about.get("dtype")), torch.float32)))
    for name, numbers in kept.items():
        ours = numbers_of(held[name]) if name in held else []
        if len(ours) != len(numbers) or not _near(ours, numbers, coarse):
            raise UserError(
                f"the adapter {adapter.folder} was trained on {named}, but {adapter.base} has "
                f"other weights ({name}): give the base it was made for."
            )


def about_base(model: nn.Module, name: str, revision: str | None) -> dict[str, Any]:
    """What longitude.json says of the base under a model with adapters."""
    weights = dict(_base_weights(model))
    chosen = sorted(weights)[:: max(1, len(weights) // TENSORS)]
    dtype = next(iter(weights.values())).dtype
    told = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
    told |= {"revision": revision} if revision else {}
    return {**told, "sample": {key: numbers_of(weights[key]) for key in chosen}}


@torch.no_grad()
def numbers_of(tensor: Tensor) -> list[float]:
    """A few numbers of a tensor, evenly spaced."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUMBERS)][:NUMBERS].double().cpu().tolist()


def _base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the base under peft's, by the base's own names."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        plain = name.removeprefix("base_model.model.")
        yield plain.replace(".base_layer.", ".").replace(".original_module.", "."), parameter


def _grown(model: Any, adapter: Adapter) -> Any:
    """The model with the longer table of positions that an adapter was trained with."""
    grown = adapter.held.get("grown")
    if not grown:
        return model
    from longitude.core.text import parse
    from longitude.hf.families.learned import resize_positions

    return resize_positions(model, parse(grown["scheme"]), grown["length"]).to(model.device)


def _near(ours: Iterable[float], theirs: Iterable[float], eps: float) -> bool:
    """Whether numbers are the same but for how they were rounded."""
    return all(
        abs(a - b) <= 2 * eps * max(abs(a), abs(b), 1e-6) for a, b in zip(ours, theirs, strict=True)
    )


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{file} should hold a JSON object: fetch the adapter again.")
    return found
