"""A run on disk: its config, its state while it trains, its weights when it is done.

    config.json               what the run is, written before the first step
    checkpoint.safetensors    weights, optimizer, losses so far and the step, while it trains
    model.safetensors         the weights, and with them the run is done
    training.json             the loss of every step, and how long it took
    hf/                       the same weights for stock transformers, where they have a home

Every file is written under another name and then moved into place, so that a kill leaves the one
before. Nothing is pickled. Nothing random has to be kept: all that is drawn follows from the seed
and the step (chance.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from longitude.core.atomic_io import atomic_file
from longitude.core.validate import UserError
from longitude.training.distributed import fill, whole
from longitude.training.lab.run import Run, read

CONFIG, STATE, MODEL, HISTORY = (
    "config.json", "checkpoint.safetensors", "model.safetensors", "training.json",
)  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")


def replaced(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all."""
    with atomic_file(path) as part:
        write(part)
        with part.open("rb") as f:
            os.fsync(f.fileno())


def write_json(path: Path, value: Any) -> None:
    """JSON that people can read."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replaced(path, lambda p: _put(p, text))


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Folder:
    """The folder of a run."""

    path: Path

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return (self.path / MODEL).is_file()

    @property
    def begun(self) -> bool:
        """Whether there is a state to go on from."""
        return (self.path / STATE).is_file()

    def run(self) -> Run | None:
        """The run that the folder holds, if it holds one."""
        try:
            return read(json.loads((self.path / CONFIG).read_text(encoding="utf-8"))["run"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as e:
            raise UserError(
                f"{self.path / CONFIG} is no run of longitude's ({e}): give another --out."
            ) from None

    def claim(self, run: Run, resume: bool) -> None:
        """Raise unless this run may write here."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file: give a folder.")
        held = self.run()
        if held is None and self.path.is_dir() and any(self.path.iterdir()):
            raise UserError(
                f"--out {self.path} holds other files and no run: give an empty or a new folder."
            )
        if held is not None and held != run:
            raise UserError(
                f"--out {self.path} holds another run ({_difference(held, run)}): "
                f"give another folder."
            )
        if held is not None and not resume and (self.done or self.begun):
            state = "is done" if self.done else "was interrupted"
            raise UserError(
                f"--out {self.path} holds this very run, which {state}: add --resume to go on "
                f"with it, or give another folder."
            )

    def save(self, step: int, model: nn.Module, optimizer: Any, losses: Tensor, first: bool) -> int:
        """Keep the state after a step; every process must ask, the first one writes."""
        state = {"losses": losses[:step].cpu(), **_state(model, optimizer)}
        if first:
            replaced(self.path / STATE, lambda p: save_file(state, p, metadata={"step": str(step)}))
        return step

    def load(self, model: nn.Module, optimizer: Any, losses: Tensor) -> int:
        """Put the state back; the step to go on with, 0 where there is none."""
        if not self.begun:
            return 0
        with safe_open(self.path / STATE, "pt") as f:
            step = int((f.metadata() or {})["step"])
            losses[:step] = f.get_tensor("losses").to(losses.device)
            for name, p in model.named_parameters():
                fill(p, f.get_tensor(f"model.{name}"))
                state = optimizer.state[p]
                for key in MOMENTS:
                    state[key] = torch.zeros_like(p)
                    fill(state[key], f.get_tensor(f"{key}.{name}"))
                state["step"] = torch.tensor(
                    float(step), device=p.device if optimizer.defaults["fused"] else "cpu"
                )
        return step


def _state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights and moments by name, whole and on the CPU."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = _kept(p)
        for key in MOMENTS:
            state[f"{key}.{name}"] = _kept(optimizer.state[p][key])
    return state


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by name, whole and on the CPU; every process must ask."""
    return {name: _kept(p) for name, p in model.named_parameters()}


def _kept(x: Tensor) -> Tensor:
    return whole(x.detach()).cpu().contiguous()


def _difference(a: Run, b: Run) -> str:
    """The first field in which two runs differ."""
    one, other = _flat(a.plain()), _flat(b.plain())
    name = next(name for name in one if one[name] != other[name])
    return f"its {name} is {one[name]}, not {other[name]}"


def _flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain["shape"], **{k: v for k, v in plain.items() if k != "shape"}}
