"""The two torch modules: positions at the input, and attention under a scheme.

Parameters come from the parts' `init` and the formulas from the parts: no encoding is named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.part import Dims, Pos, Weights, as_tensor
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import as_scheme
from longitude.ops.attention import attention
from longitude.ops.inputs import weights_of

if TYPE_CHECKING:
    from longitude.cache import Cache


class PositionEmbedding(nn.Module):
    """Sites ① and ②: draws positions and combines them with embeddings.

    ```python
    embedding = PositionEmbedding("randomized(2048) + sinusoidal()", dim=64)
    pos = embedding.positions(128, rng=torch.Generator())   # random; else the test-time form
    x = embedding(x, pos)                                    # attention takes the same pos
    ```
    """

    def __init__(
        self, scheme: Scheme | Layers | str, dim: int, rng: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.scheme = as_scheme(scheme).layer(0)
        weights = self.scheme.embed.init(Dims(dim, 1, dim), rng) if self.scheme.embed else {}
        self.weights = _parameters(weights)

    def positions(self, n: int, rng: torch.Generator | None = None) -> Pos:
        """Return the positions of n tokens, at random if `rng` is given and the scheme draws."""
        return self.scheme.positions.ids(n, rng=rng)

    def forward(self, x: Float[Tensor, "b n dim"], pos: Pos) -> Float[Tensor, "b n dim"]:
        if self.scheme.embed is None:
            return x
        return self.scheme.embed.embed(x, as_tensor(pos, x.device), _named(self.weights))

    def extra_repr(self) -> str:
        return str(self.scheme)


class PositionAttention(nn.Module):
    """Sites ③ to ⑥: attention over q, k and v, which carry no positions yet.

    Where schemes differ by layer, `layer` of `layers` selects one. With a `Cache(scheme)`, pass the
    q, k, v and positions of the new tokens only: earlier keys come from the cache.
    """

    def __init__(
        self,
        scheme: Scheme | Layers | str,
        dims: Dims,
        *,
        layer: int = 0,
        layers: int | None = None,
        rng: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.scheme = as_scheme(scheme).layer(layer, layers)
        sites = Scheme(rotary=self.scheme.rotary, bias=self.scheme.bias, scale=self.scheme.scale)
        self.weights = _parameters(sites.init(dims, rng))

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hkv m d"],
        v: Float[Tensor, "b hkv m dv"],
        q_pos: Pos,
        k_pos: Pos | None = None,
        *,
        cache: Cache | None = None,
        x: Float[Tensor, "b n dim"] | None = None,
        **options: Any,
    ) -> Float[Tensor, "b h n dv"]:
        """Attention; `options` are those of `longitude.attention`. `k_pos` defaults to `q_pos`; `x`
        is the layer's input, which forget gates read."""
        k_pos, weights = q_pos if k_pos is None else k_pos, _named(self.weights)
        gate = self.scheme.gated if x is not None else None
        gates = gate and gate.log_gates(x, weights_of(gate.name, weights))
        if cache is not None:
            cache.add(k, v, k_pos, options.pop("key_padding", None), gates)
            return cache.attend(q, q_pos, weights, **options)
        if gates is not None:
            options["forget_sums"] = gates.cumsum(-1)
        return attention(self.scheme, q, k, v, q_pos, k_pos, weights, **options)

    def extra_repr(self) -> str:
        return str(self.scheme)


def _parameters(weights: Weights) -> nn.ParameterDict:
    """Wrap weights as parameters; torch allows no dot in a parameter's name."""
    return nn.ParameterDict(
        {name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()}
    )


def _named(parameters: nn.ParameterDict) -> Weights:
    """Return the weights under the names that parts use."""
    return {name.replace("/", "."): w for name, w in parameters.items()}
