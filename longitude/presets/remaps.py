"""Presets whose rotary positions are remapped, or drawn at random in training."""

import math

from longitude import parts
from longitude.core.scheme import Scheme, preset


@preset("Su 2023, kexue.fm/archives/9708")
def su_rerope(train: int = 4096, base: float = 10000) -> Scheme:
    """ReRoPE with a window of a quarter of the trained length, and logn."""
    return Scheme.of(parts.Rope(base, remap=parts.Rerope(train // 4)), parts.LogN(train))


@preset("Su 2023, kexue.fm/archives/9708")
def su_leaky_rerope(train: int = 4096, factor: float = 16, base: float = 10000) -> Scheme:
    """Leaky ReRoPE with a window of a quarter of the trained length, and logn."""
    remap = parts.LeakyRerope(train // 4, factor)
    return Scheme.of(parts.Rope(base, remap=remap), parts.LogN(train))


@preset("Su 2023, kexue.fm/archives/9728")
def su_inverse_leaky(train: int = 512, factor: float = 8) -> Scheme:
    """Trained short with stretched distances; run long with plain RoPE."""
    return Scheme.of(parts.Rope(remap=parts.InverseLeaky(train // 4, 2 * factor)))


@preset("Jin et al. 2024, arXiv:2401.01325")
def self_extend_llama(group: int = 8, window: int = 1024, base: float = 10000) -> Scheme:
    """Grouped positions beyond a window."""
    return Scheme.of(parts.Rope(base, remap=parts.SelfExtend(group, window)))


@preset("Lu et al. 2025, arXiv:2504.18857")
def dpe_llama3(
    groups: tuple[int, ...] = (2, 8, 2, 8, 32, 32, 32, 4), window: int = 1024, base: float = 500_000
) -> Scheme:
    """Groups for each band of pairs, as the authors detected them for Llama-3-8B at 128k."""
    return Scheme.of(parts.Rope(base, remap=parts.DimensionWise(groups, window)))


@preset("Xu et al. 2025, ACL, aclanthology.org/2025.acl-long.28")
def adagrope_llama(train: int = 4096, base: float = 10000) -> Scheme:
    """Half of the trained positions, reused the more often the farther a key is."""
    return Scheme.of(parts.Rope(base, remap=parts.AdaGroPE(train // 2)))


@preset("Zhang et al. 2025, arXiv:2508.02308")
def lampe_llama3(head: int = 512, tail: int = 8, step: int = 4096) -> Scheme:
    """LaMPE with the authors' fit to Llama-3-8B."""
    remap = parts.Lampe(6204, 1.0493e-4, -2.4666, head, tail, step)
    return Scheme.of(parts.Rope(500_000, remap=remap))


@preset("ggerganov 2024, llama.cpp, PR 4815 and 4886")
def llama_cpp_groups(group: int = 4, window: int = 512, base: float = 10000) -> Scheme:
    """What llama-completion computes with --grp-attn-n and --grp-attn-w."""
    return Scheme.of(parts.Rope(base, remap=parts.GroupAttention(group, window)))


@preset("An et al. 2024, arXiv:2402.17463")
def chunk_llama(train: int = 4096, base: float = 10000) -> Scheme:
    """Dual chunk attention with the sizes of the authors' code."""
    return Scheme.of(parts.Rope(base, remap=parts.DualChunk(3 * train // 4, train // 8)))


@preset("An et al. 2024, arXiv:2410.18745")
def string_llama(train: int = 8192, local: int = 128, base: float = 500_000) -> Scheme:
    """STRING with a shift of a third of the trained length: the paper's formula."""
    return Scheme.of(parts.Rope(base, remap=parts.String(train // 3, local)))


@preset("An et al. 2024, github.com/HKUNLP/STRING")
def string_released(train: int = 8192, local: int = 128, base: float = 500_000) -> Scheme:
    """STRING as released: cosines and sines of q and k are 0.1 ln 2 + 1 times as large."""
    cooled = parts.Temperature((0.1 * math.log(2) + 1) ** -2)
    return Scheme.of(parts.Rope(base, remap=parts.String(train // 3, local)), cooled)


@preset("Xiao et al. 2023, arXiv:2309.17453")
def streaming_llm(sinks: int = 4, window: int = 1020, base: float = 10000) -> Scheme:
    """Attention sinks and a window, numbered inside the cache: endless, in constant memory."""
    return Scheme.of(parts.Rope(base, remap=parts.Streaming(sinks, window)))


@preset("Han et al. 2023, arXiv:2308.16137")
def lm_infinite_llama(train: int = 4096, first: int = 10, base: float = 10000) -> Scheme:
    """Λ-shaped attention with distances capped at the trained length."""
    return Scheme.of(parts.Rope(base, remap=parts.LmInfinite(train, first)))


@preset("Ruoss et al. 2023, arXiv:2305.16843")
def randomized_rope(max: int = 2048) -> Scheme:
    """RoPE on randomized positions."""
    return Scheme.of(parts.Randomized(max), parts.Rope())


@preset("Su 2023, kexue.fm/archives/9444")
def equal_mean_rope(mean: int = 512) -> Scheme:
    """RoPE on positions stretched at random, equal to plain ones on average."""
    return Scheme.of(parts.EqualMean(mean), parts.Rope())


@preset("Zhu et al. 2023, arXiv:2309.10400")
def pose_linear(target: int = 16384, factor: float = 8, base: float = 10000) -> Scheme:
    """Interpolation fine-tuned on short sequences with skipped positions."""
    return Scheme.of(parts.Pose(target), parts.Rope(base, frequencies=parts.Linear(factor)))


@preset("Liu et al. 2024, arXiv:2401.06951")
def e2_llm_rope(window: int = 4096) -> Scheme:
    """RoPE fine-tuned at random densities of positions; long texts interpolated into the window."""
    return Scheme.of(parts.E2Llm(window), parts.Rope())


@preset("Wu et al. 2024, arXiv:2406.07138")
def cream_linear(target: int = 32768, factor: float = 8, base: float = 10000) -> Scheme:
    """Interpolation fine-tuned on short sequences around the middle of the target."""
    return Scheme.of(parts.Cream(target), parts.Rope(base, frequencies=parts.Linear(factor)))


@preset("Shimizu et al. 2026, arXiv:2602.14050")
def random_float_rope(train: int = 512) -> Scheme:
    """RoPE on sorted real positions, random in training and evenly spaced at test time."""
    return Scheme.of(parts.RandomFloat(train), parts.Rope())
