"""LoRA adapters with the position encoding they were trained under.

peft saves the matrices of LoRA (Hu et al. 2021, arXiv:2106.09685: W + (α/r) B A) but not the
rotation: on the unpatched base they would run at other angles. So longitude.json beside
adapter_config.json holds the scheme, the base by name and by a sample of its weights (an adapter
loads into any model of its shape, but fits only one), and how a position table was resized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.store import read_json
from longitude.core.validate import UserError, short

ADAPTER_JSON, LONGITUDE_JSON = "adapter_config.json", "longitude.json"
TENSORS, NUMBERS = 16, 8  # size of the base's sample: tensors, and numbers of each


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder: the base it names, and the content of longitude.json, if any."""

    folder: Path
    base: str
    revision: str | None = None
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any] | None:
        """The scheme as `save` would write it into config.json, or None."""
        keys = ("scheme", "version", "length", "force", "target")
        entry = {key: self.held[key] for key in keys if key in self.held}
        return entry if isinstance(entry.get("scheme"), str) else None

    @property
    def target(self) -> int:
        """The length that it was trained for; 0 if it states none."""
        target = self.held.get("target")
        return target if type(target) is int else 0


def read_adapter(folder: Path, base: str | None = None) -> Adapter:
    """Read the adapter in a folder; `base` says where its base is, if that was moved."""
    peft = read_json(folder / ADAPTER_JSON)
    held = read_json(folder / LONGITUDE_JSON, optional=True)
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
    """Merge an adapter's matrices into its base; raise if `model` is another base."""
    check_peft(f"the adapter {short(str(adapter.folder))}")
    from peft import PeftModel

    check_base(model, adapter)
    resized = adapter.held.get("grown")
    if resized:  # it was trained with a longer position table
        from longitude.core.text import parse
        from longitude.hf.families.learned import resize_positions

        scheme, length = parse(resized["scheme"]), resized["length"]
        model = resize_positions(model, scheme, length).to(model.device)
    try:
        full = PeftModel.from_pretrained(model, str(adapter.folder)).merge_and_unload()
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        reason = short(" ".join(str(error).split()), 120).rstrip(".")
        raise UserError(
            f"the adapter {adapter.folder} does not fit {adapter.base} ({reason}): give the base "
            "it was made for."
        ) from error
    full.requires_grad_(False)
    return full.eval()


def check_base(model: nn.Module, adapter: Adapter) -> None:
    """Raise unless a model has the weights of the base that an adapter was trained on."""
    about = adapter.held.get("base") or {}
    sample = about.get("sample") or {}
    parameters = {name: p for name, p in model.named_parameters() if name in sample}
    dtypes = {p.dtype for p in model.parameters()}
    dtypes.add(getattr(torch, str(about.get("dtype")), torch.float32))
    eps = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
    for name, theirs in sample.items():
        ours = sample_of(parameters[name]) if name in parameters else []
        if len(ours) != len(theirs) or any(
            abs(a - b) > 2 * eps * max(abs(a), abs(b), 1e-6)
            for a, b in zip(ours, theirs, strict=True)
        ):
            raise UserError(
                f"the adapter {adapter.folder} was trained on {about.get('name', adapter.base)}, "
                f"but {adapter.base} has other weights ({name}): give the base it was made for."
            )


def about_base(model: nn.Module, name: str, revision: str | None) -> dict[str, Any]:
    """Return the entry of longitude.json about the base of a model with adapters."""
    weights = {}  # by the base's own names
    for key, parameter in model.named_parameters():
        if ".lora_" not in key and ".modules_to_save." not in key:
            key = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
            weights[key.replace(".original_module.", ".")] = parameter
    chosen = sorted(weights)[:: max(1, len(weights) // TENSORS)]
    dtype = next(iter(weights.values())).dtype
    about = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
    about |= {"revision": revision} if revision else {}
    return {**about, "sample": {key: sample_of(weights[key]) for key in chosen}}


@torch.no_grad()
def sample_of(tensor: Tensor) -> list[float]:
    """Return a few evenly spaced numbers of a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUMBERS)][:NUMBERS].double().cpu().tolist()
