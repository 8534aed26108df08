"""Attention over vLLM's paged cache, whose keys are pre-RoPE: they are rotated as they are read.

vLLM's cache of a layer is (blocks, key heads, tokens of a block, 2 · d), in any order of strides:
keys in the first half of the last dimension, values in the second. `paged_attention` runs on any
device and chooses its kernel. Attention stays outside CUDA graphs (vLLM captures what is between).

The classes that vLLM calls are made when it is there: `backend()`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longitude.core.scheme import Scheme
from longitude.ops.paged import PagedPlan, paged_attention, plan_paged


@dataclass(frozen=True)
class Batch:
    """What the layers of one step share: the new tokens of each sequence, and its blocks."""

    query_start: list[int]
    seq_lens: list[int]
    block_table: Tensor
    slots: Tensor  # where each new token is written
    plans: dict[Any, PagedPlan] = field(default_factory=dict)  # layers of one scheme share theirs

    @property
    def tokens(self) -> int:
        """New tokens, without those that pad a batch."""
        return self.query_start[-1]


class SchemeAttention:
    """The attention of one layer under its scheme, with the sizes and options of its stock
    implementation."""

    def __init__(self, scheme: Scheme, stock: Any, length: int) -> None:
        names = ("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype", "attn_type")
        for name in names:
            setattr(self, name, getattr(stock, name))
        self.alibi_slopes, self.sliding_window = None, None  # in the scheme
        self.kv_sharing_target_layer_name = None
        self.scheme, self.length = scheme, length
        self.softcap: float | None = getattr(stock, "logits_soft_cap", None) or None
        self.sinks: Tensor | None = getattr(stock, "sinks", None)

    def declined(self, like: Tensor) -> str | None:
        """Why our kernel can't decode this layer in a tensor's type and on its device, or None: the
        plan of one token says."""
        sizes: Any = self
        q = like.new_zeros(1, sizes.num_heads, sizes.head_size)
        cache = like.new_zeros(1, 16, sizes.num_kv_heads, sizes.head_size)
        table = torch.zeros(1, 1, dtype=torch.int32, device=like.device)
        options = {"softcap": self.softcap, "length": self.length}
        return plan_paged(self.scheme, q, cache, cache, table, [0, 1], [1], **options).declined

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys, then attend. vLLM measures memory without a batch."""
        if attn_metadata is None:
            return output.zero_()
        batch, size = attn_metadata, query.shape[-1]
        keys, values = (x.transpose(1, 2) for x in kv_cache.split(size, -1))
        # block 0 is never a sequence's: what has no slot (-1) may be written there
        slots = batch.slots[: batch.tokens].clamp(min=0)
        block, place = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, place] = key[: batch.tokens].to(keys.dtype)
        values[block, place] = value[: batch.tokens].to(values.dtype)
        sinks = None if self.sinks is None else self.sinks.to(query.dtype)
        step = (self.scheme, query[: batch.tokens], keys, values, batch.block_table,
                batch.query_start, batch.seq_lens)  # fmt: skip
        options = {"softcap": self.softcap, "length": self.length}
        alike = (self.scheme, self.softcap, query.shape[1:], keys.shape[1:])
        if alike not in batch.plans:
            batch.plans[alike] = plan_paged(*step, **options)
        paged_attention(
            *step,
            scale=self.scale,  # type: ignore[attr-defined]
            sink_logits=sinks,
            plan=batch.plans[alike],
            out=output[: batch.tokens],
            **options,
        )
        return output


@cache
def backend() -> Any:
    """vLLM's AttentionBackend of ours."""
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
    )

    class Builder(AttentionMetadataBuilder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Batch:
            # lengths are read on the host once per step
            common, count = common_attn_metadata, common_attn_metadata.num_reqs
            return Batch(
                common.query_start_loc_cpu[: count + 1].tolist(),
                common.seq_lens[:count].tolist(),
                common.block_table_tensor[:count],
                common.slot_mapping,
            )

    class Impl(SchemeAttention, AttentionImpl):
        pass

    class Backend(AttentionBackend):
        supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
        supports_sink = supports_sliding_window = classmethod(lambda cls: True)
        get_name = staticmethod(lambda: "CUSTOM")  # vLLM's name for what is not its own
        get_impl_cls = staticmethod(lambda: Impl)
        get_builder_cls = staticmethod(lambda: Builder)

    return Backend
