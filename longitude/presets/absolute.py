"""Absolute positions at the input, and none at all."""

from longitude.parts import (
    Bidirectional,
    Floater,
    Hierarchical,
    Learned,
    LearnedInterpolated,
    LearnedTiled,
    Multiplicative,
    Sinusoidal,
)
from longitude.presets.table import preset
from longitude.scheme import Scheme


@preset("Vaswani et al. 2017, arXiv:1706.03762")
def vaswani() -> Scheme:
    """Sinusoidal positions, decoder."""
    return Scheme.of(Sinusoidal())


@preset("Devlin et al. 2018, arXiv:1810.04805")
def bert(length: int = 512) -> Scheme:
    """Learned positions, bidirectional: BERT; also ALBERT and ERNIE."""
    return Scheme.of(Learned(length), Bidirectional())


@preset("Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165")
def gpt2(length: int = 1024) -> Scheme:
    """Learned positions, causal: GPT-2; GPT-3 with 2048."""
    return Scheme.of(Learned(length))


@preset("Liu et al. 2019, arXiv:1907.11692")
def roberta(length: int = 512) -> Scheme:
    """Learned positions that start at row 2, bidirectional."""
    return Scheme.of(Learned(length, offset=2), Bidirectional())


@preset("Su 2020, kexue.fm/archives/7947")
def hierarchical_bert(length: int = 512, alpha: float = 0.4) -> Scheme:
    """A BERT whose table of n rows reaches n² positions."""
    return Scheme.of(Hierarchical(length, alpha), Bidirectional())


@preset("Zhu et al. 2024, arXiv:2404.12096")
def interpolated_bert(length: int = 512, factor: float = 4) -> Scheme:
    """A BERT whose table is read between its rows."""
    return Scheme.of(LearnedInterpolated(length, factor), Bidirectional())


@preset("Beltagy et al. 2020, arXiv:2004.05150")
def tiled_bert(length: int = 512) -> Scheme:
    """A BERT whose table is read over and over, as Longformer starts from it."""
    return Scheme.of(LearnedTiled(length), Bidirectional())


@preset("Liu et al. 2020, arXiv:2003.09229")
def floater_transformer() -> Scheme:
    """Positions from a flow, at the input only."""
    return Scheme.of(Floater())


@preset("Su 2021, kexue.fm/archives/8130")
def multiplied(length: int = 512) -> Scheme:
    """Learned positions multiplied into the embeddings."""
    return Scheme.of(Multiplicative(length))


@preset("Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466")
def nope() -> Scheme:
    """No positions at all: the causal mask alone."""
    return Scheme.of()
