"""A whole run: begun, trained, and left on disk with a checkpoint for stock transformers.

`model.safetensors` comes last, because it is what says that a run is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longitude import __version__
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.training.checkpoint import (
    CONFIG,
    HISTORY,
    MODEL,
    STATE,
    Folder,
    replaced,
    weights,
    write_json,
)
from longitude.training.distributed import World
from longitude.training.lab.config import Shape
from longitude.training.lab.model import Decoder
from longitude.training.lab.run import Run
from longitude.training.lab.text import Corpus, windows
from longitude.training.lab.trainable import at_test
from longitude.training.loop import Manner, Progress, train
from longitude.training.to_hf import DTYPES, Home, home_of, write_home


def home(shape: Shape) -> Home:
    """The stock model that a shape trains, if there is one, with a sentence that says so."""
    return home_of(at_test(parse(shape.scheme)), shape.block)


def check_kept(dtype: str) -> None:
    """Raise unless a home can be written in this type."""
    if dtype not in DTYPES:
        raise UserError(f"--weights is {' or '.join(DTYPES)}, but got {dtype!r}: use one of them.")


def trained(
    run: Run,
    corpus: Corpus,
    folder: Folder,
    world: World,
    manner: Manner | None = None,
    kept: str = "float32",
) -> Progress:
    """Train a run to its end, going on from the state its folder has; `kept` is the type of the
    weights in hf/."""
    world.wait()  # all have looked at the folder before the first writes to it
    if world.first and folder.run() is None:
        told = {"longitude": __version__, "text": corpus.name}
        write_json(folder.path / CONFIG, {"run": run.plain(), **told})
    world.wait()
    stream = windows(corpus, run.shape.length)
    model, losses, progress = train(run, stream, folder, world, manner)
    found = weights(model)
    if world.first:
        history = {"losses": losses.tolist(), "tokens_per_second": round(progress.rate)}
        _finish(folder, run, found, history, kept)
    world.wait()
    return progress


def _finish(
    folder: Folder, run: Run, weights: dict[str, Tensor], history: dict[str, Any], kept: str
) -> None:
    """Write everything that a finished run holds, and take its state away."""
    write_json(folder.path / HISTORY, history)
    shape, kind = run.shape, home(run.shape).kind
    if kind is not None:
        sizes = {n: getattr(shape, n) for n in ("layers", "dim", "heads", "hidden", "length")}
        scheme = at_test(parse(shape.scheme))
        write_home(folder.path / "hf", kind, scheme, weights, dtype=kept, **sizes)
    replaced(folder.path / MODEL, lambda p: save_file(weights, p, metadata={"format": "pt"}))
    (folder.path / STATE).unlink(missing_ok=True)


def load(path: Path, scheme: str | None = None, device: str | torch.device = "cpu") -> Decoder:
    """A finished run's model, to be read with its test-time scheme or with another."""
    folder = Folder(path)
    run = folder.run()
    assert run is not None
    read_with = scheme or dump(at_test(parse(run.shape.scheme)))
    model = Decoder(Shape(**{**run.shape.plain(), "scheme": read_with}))
    model.load_state_dict(load_file(path / MODEL))
    return model.to(device).eval()
