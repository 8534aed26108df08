"""How processes share the tokens of a sequence (`--context-parallel`): how many, and by what.

Without a number given, the fewest whose memory holds a step, by this model of it: weights, their
gradients and both moments of AdamW, sharded over all processes; what FSDP gathers of them; the
activations of as many sequences as go through the model together; one slice of the logits.
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

TOKENS_AT_ONCE = 32768  # that go through a model together; the rest of a batch follows
STATE = 16  # bytes of a trained weight: itself, its gradient and two moments in float32
# times the widths of a layer and of its feed-forward: what each token keeps for the backward, as
# counted for Llama. The residual stream and its norms are in float32, the rest is as products are
RESIDUAL, FEED_FORWARD = 9, 4


def choose_context(
    model: Any, recipe: Recipe, length: int, dtype: str, checkpointing: bool, world: World
) -> tuple[int, str]:
    """The fewest processes whose memory holds a step on sequences of this length, and a sentence if
    one does not; always one for what can't be shared."""
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
    """What each process takes if so many share a sequence; `size` is that of a number in products,
    in bytes."""
    config, weights = text_config(model), [*model.parameters()]
    every, blocks = sum(p.numel() for p in weights), layers(model)
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    depth, width = len(blocks), config.hidden_size
    if recipe.trained == LORA:  # A and B of every matrix, and the embeddings
        trained = sum(recipe.rank * sum(p.shape) for p in weights if p.dim() == 2)
        trained += model.get_input_embeddings().weight.numel()
        state, whole = STATE * trained + size * every, size
    else:
        state, whole = STATE * every, STATE // 2  # gathered: weights and gradients
    held = state // world.size
    if world.size > 1:  # of FSDP: all that is outside of layers, a layer, and the next one
        held += whole * (every - inside + 2 * inside // depth)
    layer = 4 * RESIDUAL * width + size * FEED_FORWARD * inner_size(config)  # for each token
    # one layer is run again, or its gradients are there, once the logits are gone
    kept = depth * (4 * width if checkpointing else layer)
    kept += max(layer, 2 * size * min(config.vocab_size, SLICE))

    def needed(ranks: int) -> int:
        rows = max(1, recipe.rows * ranks // world.size)
        at_once = max(1, TOKENS_AT_ONCE // max(1, length // ranks))
        return held + kept * min(rows, at_once) * -(-length // ranks)

    return needed


def check_shareable(recipe: Recipe, family: str, length: int, world: World) -> None:
    """Raise for what --context-parallel can't share."""
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
    """How ranks share the attention over a sequence: as given, or by what sends fewer bytes."""
    ranks, heads = world.context, config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if split == "heads":
        check_division(heads, key_heads, ranks)
    if split != "auto" or ranks == 1:
        return split
    by_head = any(one.bias for one in scheme.schemes)
    divides = not heads % ranks and not key_heads % ranks and not by_head
    fewer = sends_less(heads, key_heads, ranks, getattr(torch, dtype).itemsize)
    split = "heads" if divides and fewer else "tokens"
    about = f"{heads} heads, {key_heads} of keys, over {ranks} ranks"
    progress(Event(f"context parallelism by {split}: {about}", 0, 0))
    return split
