"""Every RoPE type of transformers bit for bit: frequencies, attention factor and tables."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, GlmConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longitude.core.part import Frequencies, as_tensor
from longitude.parts import DynamicNtk, Proportional, Rope, Yarn
from longitude.parts.frequencies import powers
from longitude.parts.rotary_tables import attention_scaling

from .configurations import SCALINGS, Case, cases

EACH = 150  # random configurations of each of the seven types
FIXED = settings(
    max_examples=EACH,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = [k for k in SCALINGS if k == "default" or k in ROPE_INIT_FUNCTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_have_the_same_bits(kind: str) -> None:
    seen = []

    @FIXED
    @given(cases(kind))
    def check(case) -> None:
        rope = case.rope
        theirs, factor = case.theirs()
        ours = rope.frequencies.inv_freq(case.dim, rope.base, case.length, dtype=torch.float32)
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()
        assert rope.frequencies.gain(case.length) == factor**2
        seen.append(case)

    check()
    assert len(seen) >= EACH


@pytest.mark.skipif("proportional" not in KINDS, reason="older transformers")
@pytest.mark.parametrize("base", [58.0, 10000.0])
def test_proportional_with_every_number_of_pairs(base: float) -> None:
    # a power's last bit depends on how many are raised at once, so every number is tried
    for turning in range(16):
        parameters = {"rope_type": "proportional", "rope_theta": base}
        parameters["partial_rotary_factor"] = share = turning / 15
        case = Case(parameters, 30, 64, 1, partial(Proportional, share))
        ours = case.rope.frequencies.inv_freq(30, base, 1, dtype=torch.float32)
        assert torch.equal(ours, case.theirs()[0]), turning


MODULES = {  # transformers' tables: halves side by side (Llama, GLM) or each angle twice (Cohere)
    "llama": (LlamaConfig, LlamaRotaryEmbedding, "half"),
    "glm": (GlmConfig, GlmRotaryEmbedding, "half"),
    "cohere": (CohereConfig, CohereRotaryEmbedding, "adjacent"),
}


def tables(case, family: str, pos: torch.Tensor, dtype: torch.dtype):
    """transformers' cos and sin, from a fresh module: dynamic ones remember longer inputs."""
    config, module, _ = MODULES[family]
    return module(case.config(config))(torch.zeros(1, dtype=dtype), pos)


def hf_cos_sin(
    rope: Rope, pos, head_dim: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own bits by our parts: float32 positions times float32 frequencies (5.x,
    `LlamaRotaryEmbedding.forward`), as tables (…, n, rotary dim) of positions (…, n), laid out as
    the rope's pairs are. A model that ran longer inputs before may hold other frequencies (dynamic
    NTK); these are a fresh model's.

    They are as wide as the rotary dimensions, each angle standing twice, and carry the square root
    of the gain: transformers rotates queries and keys by the same tables.
    """
    where = as_tensor(pos)
    inv = _inv_freq(rope.frequencies, rope.dim(head_dim), rope.base, length).to(where.device)
    angle = where[..., None].float() * inv
    both = torch.cat([angle] * 2, -1) if rope.pairs == "half" else angle.repeat_interleave(2, -1)
    scaling = attention_scaling(rope.frequencies, length)
    return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)


def _inv_freq(frequencies: Frequencies, dim: int, base: float, length: int) -> torch.Tensor:
    if isinstance(frequencies, DynamicNtk) and length > frequencies.original and dim > 2:
        # a forward pass finds its length as a tensor, so the base grows in float32 there
        grown = frequencies.factor * torch.tensor(length) / frequencies.original
        grown = base * (grown - (frequencies.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / powers(dim, grown, torch.float32)
    return frequencies.inv_freq(dim, base, length, dtype=torch.float32)


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_have_the_same_bits(kind: str, family: str) -> None:
    pairs = MODULES[family][2]

    @settings(FIXED, max_examples=25)
    @given(cases(kind), st.randoms(use_true_random=False), st.sampled_from(DTYPES))
    def check(case, random, dtype) -> None:
        case = case.whole() if kind == "default" and family != "glm" else case
        last = case.length - 1
        pos = torch.tensor([[random.randint(0, last) for _ in range(7)] + [last] for _ in "ab"])
        rope = replace(case.rope, pairs=pairs)
        for ours, theirs in zip(
            hf_cos_sin(rope, pos, case.head_dim, case.length, dtype),
            tables(case, family, pos, dtype),
            strict=True,
        ):
            assert ours.dtype == theirs.dtype == dtype
            assert torch.equal(ours, theirs)

    check()


def test_tables_do_not_depend_on_what_ran_before() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    case = Case(parameters, 16, 32, 48, lambda: DynamicNtk(32, 2.0))
    pos, far = torch.arange(48)[None], torch.arange(96)[None]
    used = LlamaRotaryEmbedding(case.config(LlamaConfig))
    before = hf_cos_sin(case.rope, pos, 16, 48)
    used(torch.zeros(1), far)
    hf_cos_sin(case.rope, far, 16, 96)
    after = hf_cos_sin(case.rope, pos, 16, 48)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert torch.equal(after[0], tables(case, "llama", pos, torch.float32)[0])
    assert not torch.equal(after[0], used(torch.zeros(1), pos)[0])  # transformers remembers


def test_positions_given_as_a_range_are_the_same_tables() -> None:
    rope = Rope(pairs="adjacent", frequencies=Yarn(4.0, original=64))
    for ours, same in zip(
        hf_cos_sin(rope, range(3, 90), 16, 90),
        hf_cos_sin(rope, torch.arange(3, 90), 16, 90),
        strict=True,
    ):
        assert torch.equal(ours, same)
