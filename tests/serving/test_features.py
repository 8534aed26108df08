"""What else a server does: other architectures, adapters; and no scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import save_file

from longitude.serving import register
from tests.serving.engines import check, engine, generate, saved, small_model, tokens

REROPE = "rope(remap=rerope(32))"
OTHERS = {  # of a model, the scheme that is served, and what it shows
    "gemma2": REROPE,  # soft caps, and windows in every other layer
    "gpt_oss": REROPE,  # a sink logit for each head
    "cohere2": "rope(remap=rerope(8))",  # layers without rotation, adjacent pairs
    "stablelm": "rope(frequencies=dynamic_ntk(64))",  # a quarter of each head
    "bloom": "alibi_interpolated(4)",  # slopes for each head
    "mistral": "layers(rope(remap=rerope(8)), rope(remap=rerope(8)) + window(24))",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    text, dynamic = OTHERS[kind], "dynamic" in OTHERS[kind]
    options: dict[str, Any] = {"length": 192} if dynamic else {}
    more = {"max_num_batched_tokens": 64, "enable_prefix_caching": not dynamic}
    to = 8192 if kind == "gpt_oss" else 192  # which has YaRN, of 4,096 tokens
    with engine(saved(kind, tmp_path), text, to, **more) as llm:
        outputs = generate(llm, [tokens(n, n) for n in (150, 20)])
    check(kind, text, outputs, **options)


def test_an_adapter_and_several_samples(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    folder, model, rank = saved("llama", tmp_path / "model"), small_model("llama"), 8
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            out, width = module.weight.shape
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, width) / 8
            weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank) / 8
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(weights, adapter / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    about |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    with engine(folder, REROPE, 256, enable_lora=True, max_lora_rank=rank) as llm:
        base = generate(llm, [tokens(150)])
        request = LoRARequest("one", 1, str(adapter))
        adapted = generate(llm, [tokens(150)], lora_request=request)
        several = generate(llm, [tokens(100)], n=3, temperature=1.0)
    check("llama", REROPE, base)
    assert len({tuple(one.token_ids) for one in several[0].outputs}) == 3
    check("llama", REROPE, several, greedy=False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, module in model.named_modules():
            key = f"base_model.model.{name}.lora_{{}}.weight"
            if key.format("A") in weights:
                module.weight += weights[key.format("B")] @ weights[key.format("A")]
        try:
            check("llama", REROPE, adapted)
        finally:
            model.load_state_dict(before, strict=False)


def test_without_a_scheme_nothing_is_changed(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES
    from vllm.v1.worker.cpu_worker import CPUWorker

    folder, prompts = saved("llama", tmp_path), [tokens(40), tokens(7)]
    register()
    ours = EngineArgs.create_engine_config
    with engine(folder, block_size=32) as llm:
        config = llm.llm_engine.vllm_config
        worker = llm.llm_engine.model_executor.driver_worker.worker
        layers = config.compilation_config.static_forward_context.values()
        assert type(worker) is CPUWorker and config.model_config.max_model_len == 64
        assert all(type(layer.impl) is CPUAttentionBackendImpl for layer in layers)
        modules = worker.get_model().modules()
        rotary = [type(module) for module in modules if isinstance(module, RotaryEmbedding)]
        assert rotary and set(rotary) == {RotaryEmbedding}
        with_plugin = generate(llm, prompts)
    assert not op_registry_oot and not _ATTN_OVERRIDES
    EngineArgs.create_engine_config = ours.__wrapped__  # vLLM's own
    try:
        with engine(folder, block_size=32) as llm:
            stock = generate(llm, prompts)
    finally:
        EngineArgs.create_engine_config = ours
    for a, b in zip(with_plugin, stock, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs
    check("llama", None, stock)
