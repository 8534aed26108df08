"""Temperatures, windows, layers that differ, and positions that training draws."""

from longitude.part import Mistake
from longitude.parts import (
    Chunked,
    EqualMean,
    Linear,
    Llama4Temperature,
    LogN,
    Pose,
    Randomized,
    Rope,
    SsMax,
    Window,
)
from longitude.presets.table import preset
from longitude.scheme import Layers, Scheme


@preset("Su 2021, kexue.fm/archives/8823")
def entropy_invariant(train: int = 512) -> Scheme:
    """RoPE with logn, for models trained with it."""
    return Scheme.of(Rope(), LogN(train, clip=False))


@preset("Nakanishi 2025, arXiv:2501.19399")
def scalable_softmax() -> Scheme:
    """RoPE with a learned factor on ln n."""
    return Scheme.of(Rope(), SsMax())


@preset("Jiang et al. 2023, arXiv:2310.06825; Beltagy et al. 2020, arXiv:2004.05150")
def mistral(window: int = 4096) -> Scheme:
    """RoPE under a sliding window."""
    return Scheme.of(Rope(), Window(window))


@preset("Su 2023, kexue.fm/archives/9603")
def hwfa(train: int = 512, layers: int = 24, window: int = 16) -> Layers:
    """Window layers with RoPE, then one full layer without positions, with logn."""
    if not 2 <= layers <= 1000:
        raise Mistake(f"hwfa: layers must be 2 to 1000, but got {layers}: 24 is the post's.")
    local = Scheme.of(Rope(), Window(window))
    return Layers((*[local] * (layers - 1), Scheme.of(LogN(train, clip=False))))


@preset("Meta 2025, Llama 4")
def llama4(base: float = 500_000, chunk: int = 8192) -> Layers:
    """Three rotary layers that attend within chunks, then one that is cooled by position only."""
    local = Scheme.of(Rope(base, pairs="adjacent"), Chunked(chunk))
    return Layers((local, local, local, Scheme.of(Llama4Temperature(chunk))))


@preset("Gemma Team 2025, arXiv:2503.19786")
def gemma3(window: int = 1024, factor: float = 8) -> Layers:
    """Five local layers at base 10,000, then a global one at 1,000,000, interpolated."""
    return Layers(
        (
            *[Scheme.of(Rope(), Window(window))] * 5,
            Scheme.of(Rope(1_000_000, frequencies=Linear(factor))),
        )
    )


@preset("Ruoss et al. 2023, arXiv:2305.16843")
def randomized_rope(max: int = 2048) -> Scheme:
    """RoPE on randomized positions."""
    return Scheme.of(Randomized(max), Rope())


@preset("Su 2023, kexue.fm/archives/9444")
def equal_mean_rope(mean: int = 512) -> Scheme:
    """RoPE on positions stretched at random, equal to plain ones on average."""
    return Scheme.of(EqualMean(mean), Rope())


@preset("Zhu et al. 2023, arXiv:2309.10400")
def pose_linear(target: int = 16384, factor: float = 8, base: float = 10000) -> Scheme:
    """Interpolation fine-tuned on short sequences with skipped positions."""
    return Scheme.of(Pose(target), Rope(base, frequencies=Linear(factor)))
