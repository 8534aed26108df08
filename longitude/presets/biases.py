"""Relative positions in the scores: biases and content terms."""

from typing import Literal

from longitude.parts import (
    T5,
    Alibi,
    AlibiInterpolated,
    Bidirectional,
    Deberta,
    Fire,
    KerpleLog,
    KerplePower,
    NtkAlibi,
    Sandwich,
    Shaw,
    TransformerXl,
)
from longitude.presets.table import preset
from longitude.scheme import Scheme


@preset("Shaw et al. 2018, arXiv:1803.02155")
def shaw_encoder(clip: int = 16, values: bool = True) -> Scheme:
    """Clipped relative vectors on keys and values, bidirectional."""
    return Scheme.of(Shaw(clip, values), Bidirectional())


@preset("Shaw et al. 2018, arXiv:1803.02155")
def shaw_decoder(clip: int = 16) -> Scheme:
    """Clipped relative vectors on keys, causal."""
    return Scheme.of(Shaw(clip))


@preset("Dai et al. 2019, arXiv:1901.02860")
def transformer_xl_lm() -> Scheme:
    """Transformer-XL's relative attention, causal."""
    return Scheme.of(TransformerXl())


@preset("Yang et al. 2019, arXiv:1906.08237")
def xlnet() -> Scheme:
    """Transformer-XL's relative attention in both directions."""
    return Scheme.of(TransformerXl(), Bidirectional())


@preset("Raffel et al. 2019, arXiv:1910.10683")
def t5_encoder() -> Scheme:
    """Bucketed biases, half for each side. T5's own scores have no 1/√d: scale=1.0."""
    return Scheme.of(T5(bidirectional=True), Bidirectional())


@preset("Raffel et al. 2019, arXiv:1910.10683")
def t5_decoder() -> Scheme:
    """Bucketed biases, causal."""
    return Scheme.of(T5())


@preset("He et al. 2020, arXiv:2006.03654")
def deberta_v1() -> Scheme:
    """Disentangled attention with 512 distances a side."""
    return Scheme.of(Deberta(512), Bidirectional())


@preset("He et al. 2021, arXiv:2111.09543")
def deberta_v3() -> Scheme:
    """Disentangled attention with 256 log-spaced buckets."""
    return Scheme.of(Deberta(512, buckets=256), Bidirectional())


@preset("Press et al. 2021, arXiv:2108.12409")
def alibi_lm() -> Scheme:
    """Linear biases, causal: BLOOM, MPT, Baichuan-13B, Falcon-RW."""
    return Scheme.of(Alibi())


@preset("Press et al. 2021, arXiv:2108.12409 (bidirectional use)")
def alibi_encoder(future: float = 1, offset: float = 0.5) -> Scheme:
    """Linear biases in both directions, keys ahead half a step further away."""
    return Scheme.of(Alibi(future, offset), Bidirectional())


@preset("Al-Khateeb et al. 2023, arXiv:2310.13017")
def alibi_pi(factor: float = 4) -> Scheme:
    """An ALiBi model read further: slopes divided by the factor."""
    return Scheme.of(AlibiInterpolated(factor))


@preset("keezen 2023, github.com/keezen/ntk_alibi")
def alibi_ntk(factor: float = 4) -> Scheme:
    """An ALiBi model read further: the shallow slopes divided most."""
    return Scheme.of(NtkAlibi(factor))


@preset("Chi et al. 2022, arXiv:2205.09921")
def kerple(kind: Literal["log", "power"] = "log") -> Scheme:
    """Learned distance kernels, logarithmic or power."""
    return Scheme.of(KerplePower() if kind == "power" else KerpleLog())


@preset("Li et al. 2023, arXiv:2310.04418")
def fire_lm() -> Scheme:
    """A learned function of relative distance over position."""
    return Scheme.of(Fire())


@preset("Chi et al. 2022, arXiv:2212.10356")
def sandwich_lm() -> Scheme:
    """Inner products of sinusoidal positions as a bias."""
    return Scheme.of(Sandwich())
