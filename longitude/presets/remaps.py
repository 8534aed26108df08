"""Rotations whose positions are remapped: reading further without training."""

from longitude.parts import (
    DualChunk,
    InverseLeaky,
    LeakyRerope,
    LmInfinite,
    LogN,
    Rerope,
    Rope,
    SelfExtend,
    Streaming,
)
from longitude.presets.table import preset
from longitude.scheme import Scheme


@preset("Su 2023, kexue.fm/archives/9708")
def su_rerope(train: int = 4096, base: float = 10000) -> Scheme:
    """ReRoPE with a window of a quarter of the trained length, and logn."""
    return Scheme.of(Rope(base, remap=Rerope(train // 4)), LogN(train))


@preset("Su 2023, kexue.fm/archives/9708")
def su_leaky_rerope(train: int = 4096, factor: float = 16, base: float = 10000) -> Scheme:
    """Leaky ReRoPE with a window of a quarter of the trained length, and logn."""
    return Scheme.of(Rope(base, remap=LeakyRerope(train // 4, factor)), LogN(train))


@preset("Su 2023, kexue.fm/archives/9728")
def su_inverse_leaky(train: int = 512, factor: float = 8) -> Scheme:
    """Trained short with stretched distances; read long with plain RoPE."""
    return Scheme.of(Rope(remap=InverseLeaky(train // 4, 2 * factor)))


@preset("Jin et al. 2024, arXiv:2401.01325")
def self_extend_llama(group: int = 8, window: int = 1024, base: float = 10000) -> Scheme:
    """Grouped positions beyond a window."""
    return Scheme.of(Rope(base, remap=SelfExtend(group, window)))


@preset("An et al. 2024, arXiv:2402.17463")
def chunk_llama(train: int = 4096, base: float = 10000) -> Scheme:
    """Dual chunk attention with the sizes of the authors' code."""
    return Scheme.of(Rope(base, remap=DualChunk(3 * train // 4, train // 8)))


@preset("Xiao et al. 2023, arXiv:2309.17453")
def streaming_llm(sinks: int = 4, window: int = 1020, base: float = 10000) -> Scheme:
    """Attention sinks and a window, numbered inside the cache: endless, in constant memory."""
    return Scheme.of(Rope(base, remap=Streaming(sinks, window)))


@preset("Han et al. 2023, arXiv:2308.16137")
def lm_infinite_llama(train: int = 4096, first: int = 10, base: float = 10000) -> Scheme:
    """Λ-shaped attention with distances capped at the trained length."""
    return Scheme.of(Rope(base, remap=LmInfinite(train, first)))
