"""What a run measures on: the device, the type, the sizes that suit it, and the versions of it all.

A CPU gets small sizes, so that everything takes a minute; a CUDA device the sizes of the results
that are published.
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
SAMPLED = 256  # rows that are computed in float64, too


@dataclass(frozen=True)
class Sizes:
    """Of one case: sequences, heads of queries and of keys, tokens, and dimensions of a head."""

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
    """A run: `peers` beside us or not, `tokens` instead of the lengths that suit the device;
    `compiles` where torch.compile may be asked for a peer's sake."""

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
        """The lengths asked for, or those that suit the device."""
        return self.tokens or tuple(cuda if self.cuda else cpu)

    def goal(self, numbers: dict[str, float]) -> dict[str, float]:
        """What should be reached: on a CUDA device, for which the goals were set."""
        return numbers if self.cuda else {}

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Numbers of a normal distribution, the same each time."""
        rng = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=rng, device=self.device).to(self.dtype)

    def qkv(self, s: Sizes, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (of all tokens, or as many as `rows`), keys and values."""
        q = self.random(s.batch, s.heads, s.tokens if rows is None else rows, s.dim)
        k, v = (self.random(s.batch, s.kv, s.tokens, s.dim, seed=n) for n in (1, 2))
        return q, k, v


def setup(
    device: str = "auto", dtype: str = "auto", peers: bool = False, tokens: tuple[int, ...] = ()
) -> Setup:
    """A run as it was asked for."""
    here = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if here not in ("cpu", "cuda") or (here == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"--device {device} is not here: use auto, cpu"
            + (" or cuda." if torch.cuda.is_available() else "; torch finds no CUDA device.")
        )
    kind = ("bfloat16" if here == "cuda" else "float32") if dtype == "auto" else dtype
    if kind not in DTYPES:
        raise UserError(f"--dtype {dtype} is not measured: use auto, {', '.join(DTYPES)}.")
    if any(n < 2 for n in tokens):
        raise UserError(f"--tokens takes lengths of 2 or more, but got {min(tokens)}.")
    return Setup(torch.device(here), getattr(torch, kind), peers, tokens)


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers depend on, for the rows."""
    cuda = device.type == "cuda"
    threads = f"{torch.get_num_threads()} threads"
    known = {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {threads}",
        "longitude": __version__,
        "torch": torch.__version__,
        "triton": _installed("triton") if cuda else None,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
        "flash-attn-4": _installed("flash-attn-4") if cuda else None,
    }
    return {name: value for name, value in known.items() if value}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def one_scheme(text: str) -> Scheme:
    """The scheme that a text names, which is one for all layers."""
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def sampled(n: int, device: torch.device) -> Tensor:
    """Some of n rows, evenly spaced, the first and the last among them."""
    return torch.linspace(0, n - 1, min(SAMPLED, n), device=device).long()


def relative(got: Tensor, want: Tensor) -> float:
    """The relative error of rows (… n d), by norms, in float64: the root of its mean square.

    Row by row, because the first rows of a causal call see few keys: they are long, and exact.
    """
    off = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(off.square().mean().sqrt())
