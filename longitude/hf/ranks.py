"""Runs a patched model over the ranks of a process group: which rank has which tokens.

A forward outside `generate` runs the tokens that each rank passes, at the `position_ids` that it
passes, and returns their logits. `generate` takes the same full prompt on every rank: each runs and
caches its own part of it (in zigzag order), and the last token's hidden state is broadcast. From
then on every rank runs each new token over its own part of the cache; only outputs are exchanged,
and one rank caches the new key. All ranks choose the same token if they sample with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longitude.core.validate import UserError
from longitude.hf.layer import LAYER_STATE, tokens_of
from longitude.ops.shards import LayerGroup, answered, shard_positions

if TYPE_CHECKING:
    from longitude.hf.model_state import ForwardState

TOKENS_IN_TURN = 256  # new tokens that one rank caches before the next rank does
BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "cache_position")


class Ranks:
    """The ranks of a group, and whether every rank passes full prompts, as `generate` does."""

    def __init__(self, group: Any, model: Any, schemes: str) -> None:
        self.group, self.generating = group, False
        self.model, self.schemes = model, schemes  # the schemes of all layers, as text
        self.split = "tokens"  # or "heads": how attention shares the work of a forward
        self.segments: Tensor | None = None  # document index of each token of a forward
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @contextmanager
    def full_prompts(self) -> Iterator[None]:
        """Inside this context, forwards come from `generate`: every rank passes the same full
        prompt, then the same new tokens."""
        self.generating = True
        try:
            yield
        finally:
            self.generating = False

    def from_first(self, values: list[float], device: torch.device) -> list[float]:
        """Return the first rank's numbers on every rank."""
        shared = torch.tensor(values, dtype=torch.float64, device=device)
        with answered():
            dist.broadcast(shared, dist.get_global_rank(self.group, 0), group=self.group)
        return shared.tolist()

    def share(self, given: dict[str, Any], forward: ForwardState, ours: bool) -> dict[str, Any]:
        """Return a forward's arguments for this rank's tokens; record which of them it caches."""
        tokens = tokens_of(given)
        n = forward.columns = tokens.shape[1]
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        forward.group = LayerGroup(self.group, self.schemes, learns)
        if not self.generating:
            if forward.cache is not None or given.get("position_ids") is None:
                raise UserError(
                    "over a group each rank runs its own tokens: give their position_ids "
                    "(longitude.shard_positions) and no cache, or call generate()."
                )
            forward.sharded = True
            return given
        if not ours:
            raise UserError("over a group generate() needs a dynamic cache, and use_cache=True.")
        if forward.past or n < 2 * self.size:  # every rank runs these tokens
            column = torch.arange(forward.past, forward.past + n, device=tokens.device)
            forward.kept = (column // TOKENS_IN_TURN % self.size == self.rank).nonzero()[:, 0]
            return given
        forward.sharded = True
        indices = shard_positions(n, self.group, "zigzag").to(tokens.device)
        ids = given.get("position_ids")
        ids = torch.arange(n, device=tokens.device)[None] if ids is None else ids
        full = {name: given[name] for name in BY_TOKEN if given.get(name) is not None}
        local = {name: x.index_select(min(x.dim() - 1, 1), indices) for name, x in full.items()}
        return {**given, **local, "position_ids": ids[..., indices]}

    def last_token(self, out: Any) -> Any:
        """Give every rank the last token's hidden state, which only the first rank has computed."""
        last = out.last_hidden_state[:, -1:].contiguous()
        with answered():
            dist.broadcast(last, dist.get_global_rank(self.group, 0), group=self.group)
        out.last_hidden_state = last
        return out


def ranks_of(model: Any) -> Ranks | None:
    """The ranks that a model is patched to run over, or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None  # called for every decoded token, and a model has hundreds of modules
    states = (vars(module).get(LAYER_STATE) for module in model.modules())
    return next((state.model.ranks for state in states if state is not None), None)
