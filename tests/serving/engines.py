"""Small models, engines of vLLM in this process, and the log-probabilities that they must give."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

import longitude.hf as lh

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",  # vLLM compiles its sampler, which takes longer than a test
)

NEW, TOP, TOLERANCE = 6, 5, 1e-3
HEADS = {"hidden_size": 128, "head_dim": 32}  # of which vLLM's own CPU kernel has some sizes only


@cache
def small_model(kind: str) -> Any:
    """A random model, or the bundled one; in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.hf.tiny import MULTIMODAL, decoder, multimodal, sharp

    if kind == "tiny-rope":
        return lh.load(kind, quiet=True, device="cpu")[0].float()
    if kind == "bloom":
        config = AutoConfig.for_model(kind, vocab_size=97, hidden_size=128, n_layer=3, n_head=4)
        config.seq_length = 64
        torch.manual_seed(0)
        return sharp(AutoModelForCausalLM.from_config(config))
    if kind in MULTIMODAL:
        return multimodal(kind, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    if kind == "qwen3_5_text":  # its linear layers need bfloat16 on a CPU
        return decoder(kind, hidden_size=128, head_dim=64, layer_types=["full_attention"] * 4)
    return decoder(kind, **HEADS)


def saved(kind: str, folder: Path) -> Path:
    """The model's folder, written once."""
    from tests.hf.tiny import MULTIMODAL

    if not (folder / "config.json").is_file():
        lh.save(small_model(kind), folder)
        if kind in MULTIMODAL:  # its processor, which vLLM 0.31 reads even for texts
            from transformers import Qwen2VLImageProcessor

            Qwen2VLImageProcessor().save_pretrained(folder)
    return folder


@contextmanager
def engine(
    folder: Path | str, scheme: str | None = None, to: Any = None, **more: Any
) -> Iterator[Any]:
    """An engine in this process, gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    longitude = {"longitude": {"scheme": scheme, **({"to": to} if to else {})}} if scheme else {}
    given = {"skip_tokenizer_init": True, "enforce_eager": True, "block_size": 16}
    given |= {"dtype": "float32", "seed": 0, "additional_config": longitude}
    llm = LLM(str(folder), **{**given, **more})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens(count: int, seed: int = 0, vocabulary: int = 90) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def generate(
    llm: Any, prompts: Sequence[list[int]], lora_request: Any = None, **more: Any
) -> list[Any]:
    """Greedy continuations with the log-probabilities of the likeliest tokens."""
    from vllm import SamplingParams

    given = {"temperature": 0, "max_tokens": NEW, "logprobs": TOP, "ignore_eos": True}
    options = SamplingParams(detokenize=False, **{**given, **more})
    inputs = [{"prompt_token_ids": p} for p in prompts]
    return llm.generate(inputs, options, use_tqdm=False, lora_request=lora_request)


def check(
    kind: str, scheme: str | None, outputs: Sequence[Any], greedy: bool = True, **options: Any
) -> None:
    """Every token and its five likeliest equal those of `longitude.hf.patched`."""
    model = small_model(kind)
    with torch.no_grad(), lh.patched(model, scheme, **options) if scheme else nullcontext():
        for one in outputs:
            for continuation in one.outputs:
                new = list(continuation.token_ids)
                ids = torch.tensor([list(one.prompt_token_ids) + new])
                logits = model(ids).logits[0, -len(new) - 1 : -1].float().log_softmax(-1)
                assert not greedy or new == logits.argmax(-1).tolist()
                for ours, theirs in zip(logits, continuation.logprobs, strict=True):
                    found = sorted((each.logprob for each in theirs.values()), reverse=True)
                    best = torch.tensor(found[:TOP], dtype=ours.dtype)
                    torch.testing.assert_close(best, ours.topk(TOP).values, rtol=0, atol=TOLERANCE)
                    for token, each in theirs.items():
                        assert abs(float(ours[token]) - each.logprob) < TOLERANCE


def preemptions(llm: Any) -> int:
    """How often this engine took a running request's blocks away."""
    found = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return sum(int(metric.value) for metric in found)
