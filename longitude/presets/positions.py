"""Presets that draw positions while a model is trained."""

from longitude import parts
from longitude.core.scheme import Scheme
from longitude.presets.registry import preset


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
    """RoPE tuned at random densities of positions, read by interpolation into the window."""
    return Scheme.of(parts.E2Llm(window), parts.Rope())


@preset("Wu et al. 2024, arXiv:2406.07138")
def cream_linear(target: int = 32768, factor: float = 8, base: float = 10000) -> Scheme:
    """Interpolation fine-tuned on short sequences around the middle of the target."""
    return Scheme.of(parts.Cream(target), parts.Rope(base, frequencies=parts.Linear(factor)))


@preset("Shimizu et al. 2026, arXiv:2602.14050")
def random_float_rope(train: int = 512) -> Scheme:
    """RoPE on sorted real positions, drawn in training and even at test time."""
    return Scheme.of(parts.RandomFloat(train), parts.Rope())
