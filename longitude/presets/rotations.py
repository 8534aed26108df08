"""Rotations, and every scaling of their frequencies."""

from longitude.parts import (
    Bidirectional,
    ByParts,
    DynamicLinear,
    DynamicNtk,
    DynamicYarn,
    Linear,
    Llama3,
    LogN,
    LongRope,
    Ntk,
    NtkMixed,
    Proportional,
    Rope,
    Stepped,
    Xpos,
    Yarn,
)
from longitude.presets.table import preset
from longitude.scheme import Scheme


@preset("Su et al. 2021, arXiv:2104.09864")
def roformer() -> Scheme:
    """RoPE as published: adjacent pairs, bidirectional."""
    return Scheme.of(Rope(pairs="adjacent"), Bidirectional())


@preset("Touvron et al. 2023, arXiv:2302.13971")
def llama(base: float = 10000) -> Scheme:
    """RoPE in half pairs: Llama 1 and 2, Qwen, Mistral, SmolLM2 and most others."""
    return Scheme.of(Rope(base))


@preset("Rozière et al. 2023, arXiv:2308.12950; Liu et al. 2023, arXiv:2310.05209 (scaling laws)")
def code_llama(base: float = 1_000_000) -> Scheme:
    """Adjusted base frequency: a larger base, for models fine-tuned with it."""
    return Scheme.of(Rope(base))


@preset("Black et al. 2022, arXiv:2204.06745")
def gpt_neox(fraction: float = 0.25) -> Scheme:
    """Partial rotary: a quarter of each head turns."""
    return Scheme.of(Rope(fraction=fraction))


@preset("Sun et al. 2022, arXiv:2212.10554")
def xpos_lm() -> Scheme:
    """RoPE with decay."""
    return Scheme.of(Rope(pairs="adjacent", decay=Xpos()))


@preset("Gemma Team 2026, transformers 5.22 'proportional'")
def gemma4_global(base: float = 1_000_000, share: float = 0.25) -> Scheme:
    """The fastest quarter of the pairs turns."""
    return Scheme.of(Rope(base, frequencies=Proportional(share)))


@preset("Chen et al. 2023, arXiv:2306.15595")
def position_interpolation(factor: float = 4, base: float = 10000) -> Scheme:
    """All frequencies divided by the factor; LongChat condenses so, by 8."""
    return Scheme.of(Rope(base, frequencies=Linear(factor)))


@preset("bloc97 2023; Peng et al. 2023, arXiv:2309.00071")
def ntk_aware(factor: float = 4, base: float = 10000) -> Scheme:
    """A larger base: the fastest pair stays, the slowest is interpolated."""
    return Scheme.of(Rope(base, frequencies=Ntk(factor)))


@preset("Su 2023, kexue.fm/archives/9675")
def su_ntk_old(factor: float = 4, base: float = 10000) -> Scheme:
    """Su's first reading of NTK: the base times the factor."""
    return Scheme.of(Rope(base * factor))


@preset("Su 2023, kexue.fm/archives/9706")
def su_ntk_fixed(factor: float = 4, base: float = 10000) -> Scheme:
    """Su's NTK in a mixed base whose first digit is interpolated too."""
    return Scheme.of(Rope(base, frequencies=NtkMixed(factor, power=1)))


@preset("Su 2023, kexue.fm/archives/9706")
def su_ntk_mixed(factor: float = 4, train: int = 4096, base: float = 10000) -> Scheme:
    """Su's best NTK, with logn clipped for models trained without it."""
    return Scheme.of(Rope(base, frequencies=NtkMixed(factor)), LogN(train))


@preset("emozilla 2023; Peng et al. 2023, arXiv:2309.00071")
def dynamic_ntk_llama(original: int = 4096, factor: float = 1, base: float = 10000) -> Scheme:
    """The base grows with the length of the call."""
    return Scheme.of(Rope(base, frequencies=DynamicNtk(original, factor)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def dynamic_interpolation(original: int = 4096, base: float = 10000) -> Scheme:
    """Interpolation by just the length of the call."""
    return Scheme.of(Rope(base, frequencies=DynamicLinear(original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def ntk_by_parts(factor: float = 4, original: int = 4096, base: float = 10000) -> Scheme:
    """Slow pairs interpolated, fast ones kept; no temperature."""
    return Scheme.of(Rope(base, frequencies=ByParts(factor, original=original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def yarn_llama(factor: float = 16, original: int = 4096, base: float = 10000) -> Scheme:
    """YaRN as released."""
    return Scheme.of(Rope(base, frequencies=Yarn(factor, original=original)))


@preset("Peng et al. 2023, arXiv:2309.00071")
def dynamic_yarn_llama(original: int = 4096, base: float = 10000) -> Scheme:
    """YaRN by just the length of the call."""
    return Scheme.of(Rope(base, frequencies=DynamicYarn(original)))


@preset("Longitude")
def stepped_yarn(original: int = 4096, step: float = 1, base: float = 10000) -> Scheme:
    """YaRN whose factor grows with the query's own position: decoding equals prefill at any
    length."""
    return Scheme.of(Rope(base, frequencies=Stepped("yarn", original=original, step=step)))


@preset("Dubey et al. 2024, arXiv:2407.21783")
def llama31(factor: float = 8, original: int = 8192, base: float = 500_000) -> Scheme:
    """Llama 3.1's scaling."""
    return Scheme.of(Rope(base, frequencies=Llama3(factor, original=original)))


@preset("Ding et al. 2024, arXiv:2402.13753")
def longrope_phi3(
    short: tuple[float, ...], long: tuple[float, ...], original: int = 4096, factor: float = 32
) -> Scheme:
    """Searched factors, one for each pair."""
    return Scheme.of(Rope(frequencies=LongRope(short, long, original=original, factor=factor)))
