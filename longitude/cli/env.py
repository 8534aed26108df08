"""`longitude env`: versions and device, for bug reports."""

from __future__ import annotations

import platform
from typing import Annotated

import typer


def env(as_json: Annotated[bool, typer.Option("--json", help="Print data.")] = False) -> None:
    """Print the versions that matter in a bug report."""
    from longitude.cli.output import print_json

    found = versions()
    if as_json:
        return print_json(found)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value or 'none'}")


def versions() -> dict[str, str | None]:
    """What is installed, and what it runs on."""
    import torch

    from longitude import __version__

    cuda = torch.cuda.is_available()
    return {
        "longitude": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
    }


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
