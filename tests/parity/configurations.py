"""Random valid RoPE configurations, each with the `Rope` that should compute the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from transformers import GlmConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

from longitude.parts import DynamicNtk, Linear, Llama3, LongRope, Proportional, Rope, Unscaled, Yarn


@dataclass(frozen=True)
class Case:
    """One configuration of transformers and our name for it."""

    parameters: dict[str, Any]
    head_dim: int
    max_positions: int
    length: int
    frequencies: Callable[[], Any]

    @property
    def rope(self) -> Rope:
        """Ours, made only now: checking types draws random numbers, which no strategy may."""
        fraction = self.parameters.get("partial_rotary_factor", 1)
        if self.parameters["rope_type"] == "proportional":  # it keeps its share to itself
            fraction = 1
        return Rope(self.parameters["rope_theta"], fraction, frequencies=self.frequencies())

    @property
    def dim(self) -> int:
        """The rotary dimensions of a head."""
        return self.rope.dim(self.head_dim)

    def config(self, made: type = GlmConfig) -> Any:
        """A fresh configuration: transformers rewrites the dictionary it is given."""
        return made(
            hidden_size=2 * self.head_dim,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters=dict(self.parameters),
        )

    def whole(self) -> "Case":
        """The same for models that know no partial rotary."""
        return replace(self, parameters=self.parameters | {"partial_rotary_factor": 1.0})

    def theirs(self) -> tuple[Any, float]:
        """transformers' frequencies and attention factor at this length."""
        config = self.config()
        kind = self.parameters["rope_type"]
        if kind == "default":
            return GlmRotaryEmbedding.compute_default_rope_parameters(config)
        return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=self.length)


FACTORS = st.integers(1, 64) | st.floats(1, 64) | st.sampled_from([1.0, 2.0, 8.0, 40.0])
BASES = st.sampled_from([10000, 10000.0, 500000.0, 1e6]) | st.floats(2, 1e8)
LENGTHS = st.integers(1, 200_000)
HEADS = st.integers(2, 128).map(lambda half: 2 * half)  # at least 4: dynamic needs two pairs
MAYBE = st.none() | st.floats(0.1, 4)


@st.composite
def fractions(draw: st.DrawFn, head_dim: int) -> float:
    """1, or a share of the head that leaves an even number of at least 4 rotary dimensions."""
    common = [f for f in (1.0, 0.25, 0.5, 0.75, 0.4) if not int(head_dim * f) % 2]
    free = st.floats(0.05, 1).filter(lambda f: int(head_dim * f) % 2 == 0)
    return draw(
        st.sampled_from([f for f in common if int(head_dim * f) >= 4] or [1.0])
        | free.filter(lambda f: int(head_dim * f) >= 4)
    )


def written(**given: Any) -> dict[str, Any]:
    """The entries that were given."""
    return {key: value for key, value in given.items() if value is not None}


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    """A configuration of this RoPE type."""
    head_dim, base, length = draw(HEADS), draw(BASES), draw(LENGTHS)
    fraction = draw(fractions(head_dim))
    max_positions = draw(st.integers(64, 131_072))
    pairs = int(head_dim * fraction) // 2
    extra, frequencies = SCALINGS[kind](draw, pairs, max_positions)
    parameters = {"rope_type": kind, "rope_theta": base, "partial_rotary_factor": fraction} | extra
    return Case(parameters, head_dim, max_positions, length, frequencies)


Scaling = tuple[dict[str, Any], Callable[[], Any]]  # their entries, our frequencies


def default(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    return {}, Unscaled


def linear(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    factor = draw(FACTORS)
    return {"factor": factor}, partial(Linear, factor)


def dynamic(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    factor = draw(FACTORS)
    return {"factor": factor}, partial(DynamicNtk, positions, factor)


def yarn(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    factor, original = draw(FACTORS), draw(st.integers(1, positions))
    slow = draw(st.none() | st.floats(0.1, 4))
    fast = draw(st.none() | st.floats(5, 64))
    truncate = draw(st.sampled_from([None, True, False]))
    attention, mscale, all_dim = draw(MAYBE), draw(MAYBE), draw(MAYBE)
    scales = {"attention_factor": attention, "mscale": mscale, "mscale_all_dim": all_dim}
    given = written(beta_fast=fast, beta_slow=slow, truncate=truncate, **scales)
    ours = written(fast=fast, slow=slow, truncate=truncate, **scales)
    given |= {"factor": factor, "original_max_position_embeddings": original}
    return given, partial(Yarn, factor, original=original, **ours)


def longrope(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    lists = st.lists(st.floats(1, 64), min_size=pairs, max_size=pairs)
    short, long, original = draw(lists), draw(lists), draw(st.integers(2, positions))
    factor, attention = draw(st.none() | FACTORS), draw(MAYBE)
    given = {"short_factor": short, "long_factor": long}
    given |= {"original_max_position_embeddings": original}
    given |= written(factor=factor, attention_factor=attention)
    ours = partial(
        LongRope,
        tuple(short),
        tuple(long),
        original=original,
        factor=positions / original if factor is None else factor,
        attention_factor=attention,
    )
    return given, ours


def llama3(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    factor, original = draw(FACTORS), draw(st.integers(1, positions))
    low = draw(st.sampled_from([1, 1.0]) | st.floats(0.25, 4))
    high = low + draw(st.sampled_from([3, 3.0]) | st.floats(0.25, 32))
    given = {"factor": factor, "original_max_position_embeddings": original}
    given |= {"low_freq_factor": low, "high_freq_factor": high}
    return given, partial(Llama3, factor, original=original, low=low, high=high)


def proportional(draw: st.DrawFn, pairs: int, positions: int) -> Scaling:
    factor = draw(st.none() | FACTORS)
    share = draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(1e-3, 1))
    return written(partial_rotary_factor=share, factor=factor), partial(
        Proportional, share, factor or 1
    )


SCALINGS = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
}
