"""The presets at sizes that bite within 40 tokens, and one small layer to run them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude import Dims, Layers, Scheme, attention, parse
from longitude.core.part import Pos, Weights, as_tensor
from longitude.nn import PositionEmbedding
from longitude.ops.inputs import weights_of
from longitude.presets import PRESETS

TOKENS, DIM, HEADS, HEAD_DIM = 40, 64, 4, 16
FACTORS = (
    tuple(1 + i / 10 for i in range(HEAD_DIM // 2)),
    tuple(1.5 + i for i in range(HEAD_DIM // 2)),
)
SIZES: dict[str, tuple[Any, ...]] = {
    "bert": (64,),
    "gpt2": (64,),
    "roberta": (64,),
    "hierarchical_bert": (8,),
    "interpolated_bert": (16, 4),
    "tiled_bert": (16,),
    "multiplied": (64,),
    "drope_llama": (8, 0.4),
    "qwen2_vl": ((2, 3, 3),),
    "qwen3_vl": ((4, 2, 2),),
    "shaw_encoder": (4,),
    "shaw_decoder": (4,),
    "dynamic_ntk_llama": (16, 2),
    "dynamic_interpolation": (16,),
    "ntk_by_parts": (4, 16),
    "yarn_llama": (4, 16),
    "dynamic_yarn_llama": (16,),
    "stepped_yarn": (12,),
    "resonance_yarn": (4, 16),
    "giraffe_truncated": (16,),
    "hope": (24,),
    "rope_id": (24, 16),
    "llama31": (8, 16),
    "longrope_phi3": (*FACTORS, 16, 4),
    "su_ntk_mixed": (4, 16),
    "su_rerope": (32,),
    "su_leaky_rerope": (32, 4),
    "su_inverse_leaky": (32,),
    "self_extend_llama": (3, 8),
    "dpe_llama3": ((2, 3, 1, 4, 5, 2, 8, 3), 8),
    "adagrope_llama": (16,),
    "llama_cpp_groups": (3, 9),
    "lampe_llama3": (4, 2, 13),
    "chunk_llama": (16,),
    "string_llama": (32, 3),
    "string_released": (32, 3),
    "streaming_llm": (2, 8),
    "lm_infinite_llama": (12, 3),
    "entropy_invariant": (16,),
    "mistral": (8,),
    "hwfa": (16, 3, 6),
    "llama4": (500_000, 8),
    "rnope_swa": (6,),
    "swan": (16, 6),
    "gemma3": (6, 8),
    "randomized_rope": (128,),
    "equal_mean_rope": (40,),
    "pose_linear": (128,),
    "e2_llm_rope": (16,),
    "cream_linear": (128,),
    "random_float_rope": (16,),
}


def schemes() -> dict[str, Scheme]:
    """Every preset by name, and each distinct layer of those whose layers differ; a few
    mixtures."""
    found: dict[str, Scheme] = {}
    for name, make in PRESETS.items():
        if name == "split":  # of schemes that others have
            continue
        made = make(*SIZES.get(name, ()))
        if isinstance(made, Layers):
            for n, one in enumerate(dict.fromkeys(made.schemes)):
                found[f"{name}/{n}"] = one
        else:
            found[name] = made
    found["dimension-wise, exact pairs"] = scheme(
        "rope(remap=dimension_wise((3, 5), window=6, exact=(0, 4))) + bidirectional()"
    )
    found["fox by a learned slope"] = scheme("fox('bias')")
    found["fox, rotated, in a window"] = scheme("fox() + rope() + window(9)")
    found["fox, leaky"] = scheme("fox() + rope(remap=leaky_rerope(6, 3))")
    found["pope, leaky, in a window"] = scheme(
        "rope(pairs='polar', remap=leaky_rerope(6, 3)) + window(20) + logn(16)"
    )
    found["kerple power"] = scheme("kerple_power()")
    found["leaky + window + logn"] = scheme(
        "rope(remap=leaky_rerope(6, 3)) + window(20, sinks=3) + logn(16)"
    )
    found["dual chunk, bidirectional"] = scheme("rope(remap=dual_chunk(12, 3)) + bidirectional()")
    found["lampe"] = scheme("rope(remap=lampe(20, 0.05, -1, 4, tail=3, step=13))")
    found["stepped adagrope"] = scheme(
        "rope(frequencies=stepped('ntk', original=12), remap=adagrope(8))"
    )
    found["stepped leaky"] = scheme(
        "rope(frequencies=stepped('ntk', original=12), remap=leaky_rerope(6, 3), fraction=0.5)"
    )
    return found


def scheme(text: str) -> Scheme:
    made = parse(text)
    assert isinstance(made, Scheme)
    return made


@dataclass
class Layer:
    """Positions at the input, random projections, attention: enough for every site to matter."""

    scheme: Scheme
    kv_heads: int = HEADS
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.embedding = PositionEmbedding(self.scheme, DIM, rng).to(self.dtype)
        widths = (HEADS, self.kv_heads, self.kv_heads)
        self.into = [
            torch.randn(DIM, h * HEAD_DIM, generator=rng, dtype=torch.float64) for h in widths
        ]
        made = self.scheme.init(Dims(DIM, HEADS, HEAD_DIM), rng)
        for w in made.values():  # away from zero and from each other, so that a lost weight shows
            if w.is_floating_point():
                w += torch.rand(w.shape, generator=rng) * 0.3
        self.weights = {name: w.to(self.dtype) for name, w in made.items()}

    def qkv(self, x: Tensor, pos: Pos) -> list[Tensor]:
        """Projections (b h n d) of tokens (b n dim), which carry the embedding of their
        positions."""
        x = self.embedding(x.to(self.dtype), pos)
        made = [x @ w.to(self.dtype) / DIM**0.5 for w in self.into]
        return [m.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for m in made]

    def gates(self, x: Tensor, pos: Pos, weights: Weights | None = None) -> Tensor | None:
        """The logarithms of forget gates, where the scheme has some."""
        gate, weights = self.scheme.gated, self.weights if weights is None else weights
        if gate is None:
            return None
        x = self.embedding(x.to(self.dtype), pos)
        return gate.log_gates(x, weights_of(gate.name, weights))

    def dense(self, x: Tensor, pos: Pos, **options: Any) -> Tensor:
        """One call over all tokens."""
        q, k, v = self.qkv(x, pos)
        if (gates := self.gates(x, pos)) is not None:
            options["forget_sums"] = gates.cumsum(-1)
        return attention(self.scheme, q, k, v, pos, pos, self.weights, **options)


def tokens(n: int = TOKENS, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token vectors (b n dim), rounded to float32 so that every precision sees the same."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, DIM, generator=rng).to(torch.float64)


def positions(scheme: Scheme, n: int) -> Pos:
    """The scheme's test-time positions."""
    return scheme.positions.ids(n)


def rows(*pos: Pos) -> Tensor:
    """Positions of several sequences end to end."""
    return torch.cat([torch.atleast_1d(as_tensor(p)) for p in pos])
