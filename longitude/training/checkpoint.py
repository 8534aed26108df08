"""A run's folder: its settings, its state while it trains, and its results.

    config.json, tune.json    the settings (the run's "question"), written before the first step
    checkpoint.safetensors    trainable weights, AdamW's moments, the losses and the step so far
    training.json             the loss of every step, and the training speed

Every file is written under a temporary name and then moved into place, so that after a kill, or on
a full disk, the previous version remains. Nothing is pickled, and no random state is stored: all
random draws are a function of the seed and the step (distributed.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from longitude.core.store import LEFTOVERS, atomic_file, locked, read_json
from longitude.core.validate import UserError, shown
from longitude.training.data import reason
from longitude.training.distributed import World, assign

STATE, HISTORY = "checkpoint.safetensors", "training.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
DECISIVE = ("model", "target", "seed", "dtype")  # compared first: other fields depend on them
RESUME = "run the same command again to resume (train: with --resume)"


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, and sync it to disk."""
    with atomic_file(path) as part:
        write(part)
        with part.open("rb") as f:
            os.fsync(f.fileno())


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable weights, unsharded and on the CPU; every process must call this."""
    return {name: _on_cpu(p) for name, p in trainable_parameters(model)}


def _on_cpu(x: Any) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().contiguous()


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: `file` stores its question under `key`, and the run is complete once one
    of the files `results` exists. `normalise` adds defaults for fields that an older file lacks."""

    path: Path
    file: str
    key: str
    results: tuple[str, ...]
    normalise: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def done(self) -> bool:
        ended = any((self.path / name).is_file() for name in self.results)
        return ended and (self.path / HISTORY).is_file()

    @property
    def saved_step(self) -> int | None:
        """The step of the saved state, or None if there is no readable one."""
        try:
            with safe_open(self.path / STATE, "pt") as f:
                return int((f.metadata() or {})["step"])
        except (SafetensorError, KeyError, ValueError, OSError):
            return None

    def question(self) -> dict[str, Any] | None:
        """Return the settings of the folder's run, or None if it has no run."""
        file = self.path / self.file
        try:
            return self.normalise(json.loads(file.read_text(encoding="utf-8"))[self.key])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OSError) as e:
            raise UserError(f"{file} describes no run ({e}): give another --out.") from None

    def history(self) -> dict[str, Any]:
        return read_json(self.path / HISTORY)

    def claim(self, question: dict[str, Any], resume: bool) -> None:
        """Raise unless a run with these settings may write to the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file: give a folder.")
        existing = self.question()
        if existing is None:
            if self.path.is_dir() and {*self.path.iterdir()} - {*self.path.glob(LEFTOVERS)}:
                raise UserError(
                    f"--out {self.path} holds other files and no run: give an empty or a new "
                    f"folder."
                )
        elif existing != question:
            raise UserError(
                f"--out {self.path} holds another run ({_difference(existing, question)}): "
                f"give another folder."
            )
        elif not resume and (self.done or self.saved_step is not None):
            state = "is done" if self.done else "was interrupted"
            raise UserError(
                f"--out {self.path} holds this very run, which {state}: resume it with --resume, "
                f"or give another folder."
            )

    @contextmanager
    def begin(
        self, question: dict[str, Any], about: dict[str, Any], world: World
    ) -> Iterator[None]:
        """Lock the folder for this run, delete partial files of a killed process, and write the
        question before the first step; every process must call this."""
        world.barrier()  # all processes have read the folder before the first one writes
        acquired = True
        with ExitStack() as stack:
            if world.first:
                with self.explain_failures(0):
                    self.path.mkdir(parents=True, exist_ok=True)
                    acquired = stack.enter_context(locked(self.path))
                    for part in self.path.glob(LEFTOVERS) if acquired else ():
                        if part.is_file():
                            part.unlink()
                    if acquired and self.question() is None:
                        write_json(self.path / self.file, {self.key: question, **about})
            if not world.broadcast(acquired):
                raise UserError(
                    f"--out {self.path} is in use by another process, which trains this run: wait "
                    f"until it has ended, or give another folder."
                )
            yield

    def save(
        self, step: int, model: nn.Module, optimizer: Any, losses: Tensor, world: World
    ) -> None:
        """Save the state after a step; every process must call this, the first one writes."""
        state = {"losses": losses[:step].cpu()}
        for name, p in trainable_parameters(model):
            state[f"model.{name}"] = _on_cpu(p)
            for key in MOMENTS:
                state[f"{key}.{name}"] = _on_cpu(optimizer.state[p][key])
        if world.first:
            meta = {"step": str(step)}
            write_file(self.path / STATE, lambda part: save_file(state, part, metadata=meta))

    def load(self, model: nn.Module, optimizer: Any, losses: Tensor) -> int:
        """Restore the state; return the step to continue with, or 0 if there is no state."""
        if not (self.path / STATE).is_file():
            return 0
        with safe_open(self.path / STATE, "pt") as f:
            step = int((f.metadata() or {})["step"])
            losses[:step] = f.get_tensor("losses").to(losses.device)
            for name, p in trainable_parameters(model):
                assign(p, f.get_tensor(f"model.{name}"))
                state = optimizer.state[p]
                for key in MOMENTS:
                    state[key] = torch.zeros_like(p)
                    assign(state[key], f.get_tensor(f"{key}.{name}"))
                state["step"] = torch.tensor(float(step), device=p.device)  # for fused AdamW
        return step

    @contextmanager
    def finishing(self, history: dict[str, Any]) -> Iterator[None]:
        """Write the history, run the block, which writes the results, and then delete the state."""
        with self.explain_failures(len(history["losses"])):
            write_json(self.path / HISTORY, history)
            yield
            (self.path / STATE).unlink(missing_ok=True)

    @contextmanager
    def explain_failures(self, step: int, world: World | None = None) -> Iterator[None]:
        """After a disk error or a lost process, raise an error that says how to resume."""
        try:
            yield
        except UserError:
            raise
        except (OSError, SafetensorError, RuntimeError) as error:
            disk_error = isinstance(error, OSError | SafetensorError)
            if not disk_error and (world is None or world.size == 1):
                raise
            saved = self.saved_step
            state = f"the state of step {saved} is saved" if saved else "no state was saved before"
            failure, remedy = f"another process was lost at step {step}", RESUME
            if disk_error:
                failure = f"step {step} could not be written to {self.path}"
                disk_full = os.strerror(ENOSPC) in str(error)
                remedy = f"{'free some space' if disk_full else 'make it writable'}, then {RESUME}"
            raise UserError(f"{failure} ({reason(error)}): {state}; {remedy}.") from error


def _difference(held: dict[str, Any], given: dict[str, Any]) -> str:
    """Describe the first field in which two questions differ: decisive ones first, then nested."""
    old, new = (
        {name: question.get(name) for name in DECISIVE}
        | {k: v for part in question.values() if isinstance(part, dict) for k, v in part.items()}
        | question
        for question in (held, given)
    )
    name = next((n for n in {**old, **new} if old.get(n) != new.get(n)), "question")
    return f"its {name} is {shown(old.get(name))}, not {shown(new.get(name))}"
