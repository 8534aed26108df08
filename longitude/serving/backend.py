"""Attention over vLLM's paged cache of pre-RoPE keys, which are rotated when they are read.

vLLM's cache of a layer has the shape (blocks, key heads, block size, 2 · d), with any strides:
keys in the first half of the last dimension, values in the second. `paged_attention` runs on any
device and chooses its kernel. Attention stays outside CUDA graphs; vLLM captures the parts between.

The classes that vLLM calls are defined on demand, since they need vLLM: `backend()`.
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
    """Metadata that the layers share in one step: new tokens of each sequence, and its blocks."""

    query_start: list[int]
    seq_lens: list[int]
    block_table: Tensor
    slots: Tensor  # the cache slot of each new token
    plans: dict[Any, PagedPlan] = field(default_factory=dict)  # layers of one scheme share a plan

    @property
    def tokens(self) -> int:
        """The number of new tokens, without padding."""
        return self.query_start[-1]


class SchemeAttention:
    """The attention of one layer under its scheme, with the sizes and options of its stock
    implementation."""

    def __init__(self, scheme: Scheme, stock: Any, length: int) -> None:
        names = ("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype", "attn_type")
        for name in names:
            setattr(self, name, getattr(stock, name))
        self.alibi_slopes, self.sliding_window = None, None  # the scheme has these
        self.kv_sharing_target_layer_name = None
        self.scheme, self.length = scheme, length
        self.softcap: float | None = getattr(stock, "logits_soft_cap", None) or None
        self.sinks: Tensor | None = getattr(stock, "sinks", None)

    def declined(self, like: Tensor) -> str | None:
        """Return why our kernel can't decode this layer in the dtype and on the device of `like`
        (None if it can), according to a plan for one token."""
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
        """Write new keys and values, then attend. vLLM profiles memory without a batch."""
        if attn_metadata is None:
            return output.zero_()
        batch, size = attn_metadata, query.shape[-1]
        keys, values = (x.transpose(1, 2) for x in kv_cache.split(size, -1))
        # block 0 belongs to no sequence: tokens without a slot (-1) may be written there
        slots = batch.slots[: batch.tokens].clamp(min=0)
        block, offset = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, offset] = key[: batch.tokens].to(keys.dtype)
        values[block, offset] = value[: batch.tokens].to(values.dtype)
        sinks = None if self.sinks is None else self.sinks.to(query.dtype)
        args = (self.scheme, query[: batch.tokens], keys, values, batch.block_table,
                batch.query_start, batch.seq_lens)  # fmt: skip
        options = {"softcap": self.softcap, "length": self.length}
        plan_key = (self.scheme, self.softcap, query.shape[1:], keys.shape[1:])
        if plan_key not in batch.plans:
            batch.plans[plan_key] = plan_paged(*args, **options)
        paged_attention(
            *args,
            scale=self.scale,  # type: ignore[attr-defined]
            sink_logits=sinks,
            plan=batch.plans[plan_key],
            out=output[: batch.tokens],
            **options,
        )
        return output


@cache
def backend() -> Any:
    """Return our subclass of vLLM's AttentionBackend."""
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
        get_name = staticmethod(lambda: "CUSTOM")  # vLLM's name for external backends
        get_impl_cls = staticmethod(lambda: Impl)
        get_builder_cls = staticmethod(lambda: Builder)

    return Backend
