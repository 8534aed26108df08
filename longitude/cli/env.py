"""`longitude env`: versions and device, for bug reports."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from longitude import __version__
from longitude.cli import options as o
from longitude.cli.output import print_json


def env(as_json: o.Json = False) -> None:
    """Print the versions that matter in a bug report."""
    found = versions()
    if as_json:
        return print_json(found)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value or 'none'}")


def versions() -> dict[str, str | None]:
    """What is installed, and what it runs on."""
    import torch

    packages: dict[str, str | None] = dict.fromkeys(("transformers", "triton"))
    for name in packages:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    cuda = torch.cuda.is_available()
    return {
        "longitude": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **packages,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
    }
