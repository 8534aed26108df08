"""The settings of a run: device, dtype, sizes that suit the device, and the versions of packages.

A CPU gets small sizes, so that everything takes a minute; a CUDA device gets the sizes of the
published results.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from longitude import __version__
from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError

DTYPES = ("float32", "bfloat16", "float16")
SAMPLED = 256  # rows that are also computed in float64


@dataclass(frozen=True)
class Sizes:
    """Sizes of a case: sequences, query heads, key heads, tokens, and the dimension of a head."""

    batch: int
    heads: int
    kv: int
    tokens: int
    dim: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.kv} of keys)" if self.kv != self.heads else "")
        return f"{self.batch} × {heads} × {self.tokens:,} × {self.dim}"


@dataclass(frozen=True)
class Setup:
    """The settings of a run: whether it measures `peers`, and whether it `compiles` peers and
    baselines by torch.compile. `tokens` replaces the lengths that suit the device."""

    device: torch.device
    dtype: torch.dtype
    peers: bool = False
    tokens: tuple[int, ...] = ()
    compiles: bool = True

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def written(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def lengths(self, cuda: Sequence[int], cpu: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths given by the user, or those that suit the device."""
        return self.tokens or tuple(cuda if self.cuda else cpu)

    def goal(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return the goals on a CUDA device, for which they were set; elsewhere none."""
        return numbers if self.cuda else {}

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Draw normally distributed numbers, the same at each call."""
        rng = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=rng, device=self.device).to(self.dtype)

    def qkv(self, s: Sizes, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Draw queries (of all tokens, or only `rows` of them), keys and values."""
        q = self.random(s.batch, s.heads, s.tokens if rows is None else rows, s.dim)
        k, v = (self.random(s.batch, s.kv, s.tokens, s.dim, seed=n) for n in (1, 2))
        return q, k, v


def setup(
    device: str = "auto", dtype: str = "auto", peers: bool = False, tokens: tuple[int, ...] = ()
) -> Setup:
    """Check the options of a run and return its settings."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"--device {device} is not available: use auto, cpu"
            + (" or cuda." if torch.cuda.is_available() else "; torch finds no CUDA device.")
        )
    name = ("bfloat16" if kind == "cuda" else "float32") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UserError(f"--dtype {dtype} is not supported: use auto, {', '.join(DTYPES)}.")
    if any(n < 2 for n in tokens):
        raise UserError(f"--tokens takes lengths of 2 or more, but got {min(tokens)}.")
    return Setup(torch.device(kind), getattr(torch, name), peers, tokens)


def machine(device: torch.device) -> dict[str, str]:
    """Return what the measurements depend on: the device and the versions of packages."""
    cuda = device.type == "cuda"
    threads = f"{torch.get_num_threads()} threads"
    facts = {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {threads}",
        "longitude": __version__,
        "torch": torch.__version__,
        "triton": _installed("triton") if cuda else None,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "flash-attn-4": _installed("flash-attn-4") if cuda else None,
    }
    return {name: value for name, value in facts.items() if value}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def one_scheme(text: str) -> Scheme:
    """Parse the text of a scheme that is the same for all layers."""
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme


def sampled(n: int, device: torch.device) -> Tensor:
    """Return the indices of at most SAMPLED of n rows, evenly spaced, including first and last."""
    return torch.linspace(0, n - 1, min(SAMPLED, n), device=device).long()


def relative(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the relative errors of rows (… n d), by norms in float64.

    Row by row, because the first rows of a causal call see few keys: they are large, and exact.
    """
    errors = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(errors.square().mean().sqrt())
