"""`longitude bench` and `env`: the benchmark suites of a checkout (`python -m benchmarks`), and
versions and device for bug reports."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from typer import Option

from longitude import __version__
from longitude.cli import common as o
from longitude.cli.common import print_json
from longitude.core.validate import UserError


def bench(
    suite: Annotated[
        str, Option(help="rope, attention, decode, paged, model, ranks or all.")
    ] = "all",
    peers: Annotated[
        bool, Option("--peers", help="Also what is installed of other packages.")
    ] = False,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, Option(help="auto (bfloat16 on CUDA), float32, bfloat16 or float16.")
    ] = "auto",
    tokens: Annotated[
        str | None, Option(help="Lengths, as in 8192,32768, instead of the device's own.")
    ] = None,
    only: Annotated[
        str, Option(help="Only cases with this in their name or sizes, as progress shows them.")
    ] = "",
    rounds: Annotated[int, Option(help="Rounds in which all methods are interleaved.")] = 5,
    minutes: Annotated[float | None, Option(help="Start no case after this many minutes.")] = None,
    given: Annotated[
        list[Path] | None,
        Option("--from", help="Show these rows instead of measuring; repeatable."),
    ] = None,
    out: Annotated[
        list[Path] | None,
        Option(
            help="Also write rows (.jsonl), the tables (.md) or a chart (.html, .png, .svg); "
            "repeatable."
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print a line of JSON for each row, as it comes.")
    ] = False,
) -> None:
    """Time rotation, attention, decoding and full models, each against the best it could be.

    Methods are interleaved within rounds; numbers are medians. Speed is the baseline's time divided
    by the method's: 1 means as fast as a copy (rope), as rotation and plain attention (attention),
    as SDPA over rotated keys (decode), as the unpatched model (model). Errors are against float64.
    """
    try:
        from benchmarks.suites.run import BenchOptions, bench
    except ModuleNotFoundError as e:
        if e.name not in ("benchmarks", "benchmarks.suites"):
            raise
        raise UserError(
            "longitude bench needs a checkout of the repository, whose benchmarks/ is not part of "
            "the installed package: clone it and run `python -m benchmarks` there."
        ) from None
    options = BenchOptions(suite, peers, device, dtype, tokens, rounds, minutes, as_json, only)
    bench(options, given or [], out or [])


def env(as_json: o.Json = False) -> None:
    """Print the versions that matter in a bug report."""
    import torch

    packages: dict[str, str | None] = dict.fromkeys(("transformers", "triton", "flash-attn-4"))
    for name in packages:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    cuda = torch.cuda.is_available()
    values = {
        "longitude": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **packages,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
    }
    if as_json:
        return print_json(values)
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value or 'none'}")
