"""Losses of a live model against one forward, all its logits and torch's cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import longitude.hf as lh
from longitude import UserError
from longitude.eval import prefill
from longitude.eval.perplexity import is_out_of_memory, losses, tail_losses
from longitude.eval.prefill import chunk_for, lm_head
from tests.hf import tiny

TEXT = "\n".join(topics[name] for name in sorted(topics)).encode()
MODELS: dict[str, Any] = {}


def model(name: str) -> Any:
    """In float32; BLOOM's in float64, for it adds slope × position to its scores, and float32 then
    rounds a plain forward's losses by 1e-4."""
    if name not in MODELS:
        dtype = "float64" if name == "tiny-alibi" else "float32"
        MODELS[name] = lh.load(name, device="cpu", dtype=dtype, quiet=True)[0]
    return MODELS[name]


def tokens(n: int) -> Tensor:
    return torch.tensor(list(TEXT[:n]))


def plainly(model: Any, ids: Tensor) -> Tensor:
    """One forward, all its logits."""
    with torch.no_grad():
        logits = model(ids[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), ids[1:], reduction="none")


def same(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)  # up to 20 nats past a window


CASES = [
    ("tiny-rope", None, 400),
    ("tiny-rope", "rope(remap=leaky_rerope(128, 16))", 400),
    ("tiny-rope", "rope(frequencies=yarn(4, original=256))", 400),
    ("tiny-rope", "rope(frequencies=dynamic_ntk(256))", 400),
    ("tiny-alibi", None, 400),
    ("tiny-alibi", "ntk_alibi(4)", 400),
    ("tiny-learned", None, 256),
    ("tiny-learned", "learned_interpolated(256, 4)", 400),
]


@pytest.mark.parametrize(("name", "scheme", "n"), CASES)
def test_every_token_has_the_loss_of_one_plain_forward(
    name: str, scheme: str | None, n: int
) -> None:
    m, ids = model(name), tokens(n)
    with nullcontext() if scheme is None else lh.patched(m, scheme, length=n):
        want = plainly(m, ids)
        for chunk in (None, 150):
            found = losses(m, ids, chunk=chunk)
            assert found.shape == (n - 1,) and found.dtype == torch.float32
            same(found, want)
        for tail in (1, 130):
            found = tail_losses(m, ids, tail, chunk=150)
            same(found, want[-tail:])


@pytest.mark.parametrize("chunk", [None, 70])
def test_texts_of_one_length_are_scored_as_each_alone(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = model("tiny-rope")
    ids = torch.stack([tokens(1200)[at : at + 200] for at in (0, 300, 500, 900, 1000)])
    want = torch.stack([tail_losses(m, row, 60) for row in ids])
    for at_once in (2**15, 2 * 200, 1):  # all rows in one forward, two, or one
        monkeypatch.setattr(prefill, "CPU_BATCH_TOKENS", at_once)
        with lengths_read(m) as read:
            found = tail_losses(m, ids, 60, chunk=chunk)
        assert read[0] == (min(5, max(1, at_once // 200)), chunk or 199)
        same(found, want)


@contextmanager
def lengths_read(m: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of tokens that a model reads."""
    shapes: list[tuple[int, ...]] = []
    hook = m.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape))
    )
    yield shapes
    hook.remove()


@contextmanager
def seen(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that a module gives out."""
    shapes: list[tuple[int, ...]] = []
    hook = module.register_forward_hook(lambda m, given, out: shapes.append(tuple(out.shape)))
    yield shapes
    hook.remove()


# windows, soft caps, sinks, parallel blocks, experts, latent heads, chunks; the last three compute
# more in a layer than an attention and what follows for each token
KINDS = (
    "llama", "gemma2", "gpt_oss", "phi", "mixtral", "deepseek_v3", "llama4_text", "diffllama",
    "falcon_h1", "longcat_flash",
)  # fmt: skip


@pytest.mark.parametrize("scheme", [None, "rope(remap=rerope(8))"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_computes_no_token_that_is_not_scored(kind: str, scheme: str | None) -> None:
    m, ids = tiny.shared(kind), tiny.ids(49, 2)
    with nullcontext() if scheme is None else lh.patched(m, scheme, check=False):
        for n, scored in ((49, 12), (20, 12)):
            want = torch.stack([plainly(m, row[:n])[-scored:] for row in ids])
            same(tail_losses(m, ids[:, :n], scored), want)
        (read,) = prefill.prefill(m, ids, last=12)
        (most,) = prefill.prefill(m, ids, last=30)  # in one go, if more than half are wanted
    assert read.hidden.shape[1] == len(read.pos) == (49 if kind in KINDS[-3:] else 12)
    assert most.hidden.shape[1] == 49


def test_logits_are_made_a_stretch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    m, ids = model("tiny-rope"), tokens(650)
    monkeypatch.setattr(prefill, "LOGITS_AT_ONCE", 256 * 100)
    lm_head(m)  # which asks a model once, with a few tokens
    with seen(m.get_output_embeddings()) as shapes:
        losses(m, ids)
        whole, shapes[:] = list(shapes), []
        tail_losses(m, ids, 130, chunk=300)
    sizes = [shape[-2] for shape in whole]
    assert sizes == [1, *[100] * 6, 49], "the last token of the forward, then all, by stretches"
    assert [shape[-2] for shape in shapes if shape[-2]] == [1, 1, 81, 1, 49], (
        "nothing of the first chunk"
    )


def test_a_text_too_long_for_one_forward_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    m, ids = model("tiny-rope"), tokens(601)
    assert chunk_for(m, 1, 600, lm_head(m)) == 600
    read: list[int] = []
    hook = m.model.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(prefill, "ACTIVATION_BYTES", 5 * 2**20)
    found = losses(m, ids)
    hook.remove()
    assert read == [300, 300]
    same(found, plainly(m, ids))


def test_attention_that_holds_all_scores_reads_shorter_chunks() -> None:
    """BLOOM's attention has heads × tokens × keys in memory."""
    rope, alibi = model("tiny-rope"), model("tiny-alibi")
    assert chunk_for(rope, 1, 2**16, lm_head(rope)) == 2**16
    assert chunk_for(rope, 64, 2**16, lm_head(rope)) < 2**12, "rows count, too"
    chunk = chunk_for(alibi, 1, 2**16, lm_head(alibi))
    assert 6 * 4 * chunk * 2**16 < prefill.ACTIVATION_BYTES
    assert chunk >= 256


def test_a_long_text_of_a_small_model_needs_no_mask_and_no_cache() -> None:
    """SmolLM2-135M at 131,072 tokens in bfloat16: chunks would cost a mask and its slow kernel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=1)
    with torch.device("meta"):
        m: Any = LlamaForCausalLM(config)
        m = m.to(torch.bfloat16)
    head = prefill.Head(m.lm_head, lambda x: x)
    assert chunk_for(m, 1, 2**17, head) == 2**17
    assert prefill.MIN_CHUNK <= chunk_for(m, 1, 2**20, head) <= 2**10, "there it takes a mask"


def capped(kind: str) -> Any:
    """A small random model that does something to its logits behind the head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    more: dict[str, Any] = {
        "gemma2": {"final_logit_softcapping": 0.05, "sliding_window": 16},
        "granite": {"logits_scaling": 0.1},
        "cohere": {"logit_scale": 7.0},
    }[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **made, **more, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_what_comes_behind_the_head_is_done_too(kind: str) -> None:
    m, ids = capped(kind), tokens(120) % 64
    assert lm_head(m).module is not None
    for chunk in (None, 50):
        found = losses(m, ids, chunk=chunk)
        same(found, plainly(m, ids))


class Doubled(nn.Module):
    """A model of another kind: it doubles its logits, and its configuration says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model("tiny-rope")
        self.config, self.dtype = self.inner.config, torch.float32
        self.get_output_embeddings = self.inner.get_output_embeddings
        self.get_input_embeddings = self.inner.get_input_embeddings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


def test_a_head_that_does_not_tell_all_is_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, ids = Doubled(), tokens(301)
    monkeypatch.setattr(prefill, "LOGITS_AT_ONCE", 256 * 64)
    assert lm_head(m).module is None
    with seen(m.get_output_embeddings()) as shapes:
        found = losses(m, ids)
    assert max(shape[-2] for shape in shapes) <= 64
    same(found, plainly(m, ids))


def test_nothing_stays_on_the_model() -> None:
    m = model("tiny-rope")
    losses(m, tokens(50), chunk=20)
    assert m(tokens(9)[None]).logits.shape == (1, 9, 256)


def test_memory_that_ran_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**56)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(UserError("out of memory"))
    assert not is_out_of_memory(KeyError("out of memory"))


def test_what_makes_no_sense_is_told() -> None:
    m = model("tiny-rope")
    with pytest.raises(UserError, match="2 tokens or more, but got 1"):
        losses(m, tokens(1))
    with pytest.raises(UserError, match="got 9 of 9 tokens"):
        tail_losses(m, tokens(9), 9)
    with pytest.raises(UserError, match="1 token or more, but got 0"):
        losses(m, tokens(9), chunk=0)
