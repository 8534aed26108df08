"""`longitude inspect`: which positions a checkpoint has, how far they reach, and its faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from longitude.hf.encodings import Encoding
    from longitude.hf.faults import Fault
    from longitude.inspection.checkpoint import Inspected
    from longitude.inspection.score_rows import Measured
    from longitude.runtimes.lint import Lint

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a config.json, a .gguf file, or tiny-rope.",
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Every known model type, in one table.")]
To = Annotated[
    str | None,
    typer.Option("--to", metavar="LENGTH", help="A length to reach: 32768, 32k, or 4x the window."),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--weights", help="Load the weights, and measure scores by distance, heads and sinks."
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--length", help="Tokens for --weights. [default: twice the window]")
]

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file or folder for --weights to read; as often as you like. Without: Python's help "
        "topics.",
    ),
]


def inspect(
    model: Source = None,
    every: Every = False,
    to: To = None,
    weights: Weights = False,
    length: Tokens = None,
    text: Texts = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Say which position encoding a model has, and what follows from it.

    From its configuration alone: the encoding of each part and layer; the window, and the entry
    that says so; wavelengths against it; which dimensions saw a whole turn in training, how far
    that reaches, and the least base for the window; faults of the file with their cures, and what
    runtimes make of it. The exit code is 1 if the file has a fault.
    """
    from longitude.core.validate import UserError

    if every == (model is not None):
        raise UserError("inspect takes one model, or --all for every known type: give one.")
    if not weights and (length is not None or text):
        raise UserError("--length and --text are what --weights reads: give --weights too.")
    if every and (to or weights):
        raise UserError("--to and --weights are about one model: give its name in place of --all.")
    if every:
        _table(as_json)
        return
    assert model is not None
    found = _inspected(model, revision, to)
    linted, problem = _linted(model, revision, found.encodings)
    measured = _measured(model, revision, length, text) if weights else None
    if as_json:
        _print(found.plain(), linted, problem, measured)
    else:
        _show(found, linted, problem, measured)
    if found.faults:
        raise typer.Exit(1)


def _table(as_json: bool) -> None:
    from longitude.cli.output import console, print_json
    from longitude.hf.encodings import known_models
    from longitude.viz.encodings import table

    if as_json:
        print_json([row.plain() for row in known_models()])
    else:
        table(known_models(), console())


def _inspected(name: str, revision: str | None, to: str | None) -> Inspected:
    from longitude.inspection.checkpoint import inspected

    encodings, faults = _read(name, revision)
    target = _target(name, to, encodings[0].window) if to else None
    return inspected(name, encodings, faults, target)


def _target(name: str, to: str, window: int | None) -> int:
    from longitude.core.validate import UserError
    from longitude.extension.prepare import target_of

    if to.endswith("x") and not window:
        raise UserError(f"{name} does not say its window, so --to {to} is no length: give tokens.")
    target = target_of(to, window or 0)
    if target < 8:
        raise UserError(f"--to {to} is {target} tokens, less than one turn: give more.")
    return target


def _read(name: str, revision: str | None) -> tuple[tuple[Encoding, ...], list[Fault]]:
    """The encodings of a configuration or of a GGUF file's header, and the faults of the first."""
    from pathlib import Path

    from longitude.core.validate import UserError
    from longitude.hf.device import quiet_transformers
    from longitude.hf.encodings import Encoding, read_encodings
    from longitude.hf.faults import faults
    from longitude.hf.gguf_config import gguf_encodings, has_rotary
    from longitude.hf.gguf_reader import read_header
    from longitude.hf.rope_config import read_config
    from longitude.hf.source import find, raw_config
    from longitude.runtimes.checkpoint import gguf_config

    if Path(name).is_file() and Path(name).suffix == ".json":
        raw = read_config(name)
    else:
        source = find(name, revision)
        if source.gguf is not None:
            header = read_header(source.gguf)
            return gguf_encodings(header, gguf_config(header) if has_rotary(header) else None), []
        raw = raw_config(source)[1]
    wrong = faults(raw)
    with quiet_transformers(bars=True):
        try:
            return read_encodings(raw), wrong
        except UserError as mistake:
            if not wrong:
                raise
            told = Encoding("unknown", where="faults of the file", notes=(str(mistake),))
            return (told,), wrong


def _linted(
    name: str, revision: str | None, encodings: tuple[Encoding, ...]
) -> tuple[Lint | None, str]:
    """What runtimes make of the settings; or why that can't be told."""
    from longitude.core.validate import UserError
    from longitude.runtimes.lint import lint, settings_of

    if encodings[0].kind != "rope" or encodings[0].scheme is None:
        return None, ""
    try:
        return lint(settings_of(name, revision)), ""
    except UserError as mistake:
        return None, str(mistake)


def _measured(
    name: str, revision: str | None, length: int | None, text: list[str] | None
) -> Measured:
    from longitude.inspection.scores import Options, measure

    return measure(name, Options(length=length, text=tuple(text or ()), revision=revision))


def _print(
    plain: Mapping[str, Any], linted: Lint | None, problem: str, measured: Measured | None
) -> None:
    from longitude.cli import lint
    from longitude.cli.output import print_json

    told = {"lint": lint.plain(linted) if linted else None}
    told |= {"lint_refused": problem} if problem else {}
    told |= {"weights": measured.plain()} if measured else {}
    print_json({**plain, **told})


def _show(found: Inspected, linted: Lint | None, problem: str, measured: Measured | None) -> None:
    from longitude.cli.output import console
    from longitude.hf.encodings import KINDS
    from longitude.viz import encodings

    out = console()
    encodings.show(found, KINDS, out)
    _show_lint(linted, problem, out)
    if measured:
        from longitude.viz.scores import show

        out.print()
        show(measured, out)


def _show_lint(linted: Lint | None, problem: str, out: Console) -> None:
    """The runtimes' rows, as `longitude lint` prints them, without the faults."""
    from dataclasses import replace

    from rich.text import Text

    from longitude.cli import lint

    if linted is None and not problem:
        return
    out.print()
    out.print(Text("what runtimes make of it", style="bold"))
    if linted is None:
        out.print(Text(f"can't be told: {problem}"))
    else:
        lint.show(replace(linted, faults=()), out)
