"""Context parallelism (`--context-parallel`): how many processes share a sequence, and how.

By default, the fewest processes whose memory holds a step. The memory is estimated as the sum of
weights, gradients and both moments of AdamW, sharded over all processes; what FSDP gathers of them;
the activations of the sequences in one forward pass; and one slice of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longitude.core.progress import Event, Progress
from longitude.core.validate import UserError
from longitude.eval.prefill import inner_size, text_config
from longitude.hf.patch import check_over_ranks
from longitude.ops.head_split import check_division, sends_less
from longitude.training.distributed import World, fewest_ranks, layers
from longitude.training.loss import SLICE
from longitude.training.tune.model import LORA
from longitude.training.tune.recipes import Recipe

TOKENS_AT_ONCE = 32768  # per forward pass; larger batches are accumulated
STATE = 16  # bytes per trainable weight: itself, its gradient and two moments in float32
# values stored per token for the backward pass, counted for Llama: multiples of a layer's width
# (residual stream and norms, in float32) and of its feed-forward's (in the products' dtype)
RESIDUAL, FEED_FORWARD = 9, 4


def choose_context(
    model: Any, recipe: Recipe, length: int, dtype: str, checkpointing: bool, world: World
) -> tuple[int, str]:
    """Return the fewest processes whose memory holds a step on sequences of this length, and a
    message if one is not enough; always one if the sequences can't be shared."""
    needed = step_bytes(model, recipe, length, getattr(torch, dtype).itemsize, checkpointing, world)
    size = world.size
    try:
        check_over_ranks(model)
    except UserError:
        size = 1
    if recipe.groups is not None or length < 2 * size:
        size = 1
    return fewest_ranks(length, needed, size, world.device)


def step_bytes(
    model: Any, recipe: Recipe, length: int, size: int, checkpointing: bool, world: World
) -> Callable[[int], int]:
    """Return a function from the number of processes that share a sequence to the bytes that each
    needs; `size` is the bytes of an element in matrix products."""
    config, weights = text_config(model), [*model.parameters()]
    total, blocks = sum(p.numel() for p in weights), layers(model)
    in_layers = sum(p.numel() for block in blocks for p in block.parameters())
    depth, width = len(blocks), config.hidden_size
    if recipe.trained == LORA:  # A and B of every matrix, and the embeddings
        trained = sum(recipe.rank * sum(p.shape) for p in weights if p.dim() == 2)
        trained += model.get_input_embeddings().weight.numel()
        state_bytes, gathered = STATE * trained + size * total, size
    else:
        state_bytes, gathered = STATE * total, STATE // 2  # gathered: weights and gradients
    fixed = state_bytes // world.size
    if world.size > 1:  # gathered by FSDP: all outside of the layers, one layer, and the next one
        fixed += gathered * (total - in_layers + 2 * in_layers // depth)
    layer_bytes = 4 * RESIDUAL * width + size * FEED_FORWARD * inner_size(config)  # per token
    # recomputing a layer, or its gradients, needs memory only after the logits are freed
    per_token = depth * (4 * width if checkpointing else layer_bytes)
    per_token += max(layer_bytes, 2 * size * min(config.vocab_size, SLICE))

    def needed(ranks: int) -> int:
        rows = max(1, recipe.rows * ranks // world.size)
        at_once = max(1, TOKENS_AT_ONCE // max(1, length // ranks))
        return fixed + per_token * min(rows, at_once) * -(-length // ranks)

    return needed


def check_shareable(recipe: Recipe, family: str, length: int, world: World) -> None:
    """Raise for models, recipes and lengths that --context-parallel doesn't support."""
    if world.context > 1 and (recipe.groups is not None or family != "rope"):
        raise UserError(
            "--context-parallel runs models with rotary embeddings, and no recipe that trains on "
            "groups of tokens (longlora): leave it out, or take another recipe."
        )
    if length < 2 * world.context:
        raise UserError(
            f"sequences of {length} tokens are too short for --context-parallel {world.context}: "
            f"give at least {2 * world.context}."
        )


def split_for(
    config: Any, scheme: Any, dtype: str, split: str, world: World, progress: Progress
) -> str:
    """Return how ranks split attention: as given, or for `auto` by what sends fewer bytes."""
    ranks, heads = world.context, config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if split == "heads":
        check_division(heads, key_heads, ranks)
    if split != "auto" or ranks == 1:
        return split
    by_head = any(layer.bias for layer in scheme.schemes)
    divides = not heads % ranks and not key_heads % ranks and not by_head
    fewer = sends_less(heads, key_heads, ranks, getattr(torch, dtype).itemsize)
    split = "heads" if divides and fewer else "tokens"
    sizes = f"{heads} heads, {key_heads} of keys, over {ranks} ranks"
    progress(Event(f"context parallelism by {split}: {sizes}", 0, 0))
    return split
