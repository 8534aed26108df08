"""Streaming: constant memory, the loss of a window read afresh, and sinks that matter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.training.data import gather
from tests.hf.tiny import WINDOW, decoder, ids

SINKS = 4
STATM = Path("/proc/self/statm")


@pytest.fixture(scope="module")
def rope() -> Any:
    """A model of bytes, trained to 256, and its tokenizer."""
    return lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)


def text(tokens: int) -> torch.Tensor:
    """Bytes of the lab's test files."""
    joined = b"\0".join(gather().test)
    assert len(joined) >= tokens
    return torch.frombuffer(bytearray(joined[:tokens]), dtype=torch.uint8).long()


def resident() -> int:
    """Pages of memory that this process has, where the system tells."""
    return int(STATM.read_text().split()[1]) if STATM.exists() else 0


def afresh(model: Any, tokens: torch.Tensor, window: int, places: torch.Tensor) -> torch.Tensor:
    """The loss of the tokens at some places, each after the sinks and the window before it, read
    as a text of its own by the stock model."""
    rows = [torch.cat([tokens[:SINKS], tokens[p - window : p]]) for p in places.tolist()]
    with torch.inference_mode():
        said = [
            model(part, logits_to_keep=1, use_cache=False).logits[:, -1]
            for part in torch.stack(rows).split(50)
        ]
    return F.cross_entropy(torch.cat(said), tokens[places], reduction="none")


@pytest.mark.parametrize(
    ("many", "window"),
    [(10_000, 60), pytest.param(200_000, 200, marks=pytest.mark.slow)],
)
def test_memory_is_flat_and_the_loss_that_of_a_fresh_window(
    rope: Any, many: int, window: int
) -> None:
    model, _ = rope
    tokens, memory, pages, losses = text(many), [], [], []
    with lh.stream(model, sinks=SINKS, window=window) as s:
        for block in tokens.split(1024):
            losses.append(s.score(block, chunk=256))
            memory.append(s.memory)
            pages.append(resident())
    assert s.tokens == many
    held = memory[4:-1]  # the last block is shorter
    assert max(held) <= 1.01 * min(held)
    # what was read would be 15 kB a token; a twentieth of that would show here (the memo of tables
    # fills up to its bound meanwhile, and memory comes in pages of two megabytes)
    assert (pages[-1] - pages[4]) * 4096 < 800 * many
    places = many - 4000 + torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:200]
    streamed = torch.cat(losses)[places - 1].mean()
    assert streamed <= 1.02 * afresh(model, tokens, window, places).mean()


@pytest.mark.slow
def test_without_sinks_a_real_model_collapses(smollm2_file: Path) -> None:
    from pydoc_data.topics import topics

    model, tokenizer = lh.load(smollm2_file, device="cpu", quiet=True)
    assert tokenizer is not None
    page = "\n".join(topics[name] for name in sorted(topics))[:8000]
    tokens = tokenizer(page, verbose=False)["input_ids"][:800]
    losses = {}
    for sinks in (4, 0):
        with lh.stream(model, sinks=sinks, window=512) as s:
            losses[sinks] = s.score(tokens, chunk=400)
    torch.testing.assert_close(losses[0][:500], losses[4][:500], atol=1e-3, rtol=1e-3)
    assert losses[0][600:].mean() >= losses[4][600:].mean() + 0.3


def test_ten_million_tokens_on_nothing_has_changed(rope: Any) -> None:
    tokens = text(650)
    found = {}
    for far in (1_000, 10_000_000):
        with lh.stream(rope[0], sinks=SINKS, window=100) as s:
            s.feed(tokens[:SINKS])
            s.tokens = far  # as if all in between had been read, and had left the window
            found[far] = torch.cat([s.score(tokens[SINKS:600]), s.score(tokens[600:650], chunk=1)])
    torch.testing.assert_close(found[10_000_000], found[1_000], atol=1e-4, rtol=1e-4)


def scored(model: Any, tokens: torch.Tensor, chunk: int, **how: Any) -> torch.Tensor:
    with lh.stream(model, **how) as s:
        return s.score(tokens, chunk=chunk)


@pytest.mark.parametrize("sinks", [0, 4])
def test_chunks_and_steps_are_one_forward(rope: Any, sinks: int) -> None:
    model, tokens = rope[0], text(500)
    how = {"sinks": sinks, "window": 60}
    written = f"rope(remap=streaming({sinks}, 60))" if sinks else "rope() + window(60)"
    with lh.patched(model, written), torch.no_grad():
        said = model(tokens[None, :-1], use_cache=False).logits[0]
    expected = F.cross_entropy(said, tokens[1:], reduction="none")
    for chunk in (50, 512):
        found = scored(model, tokens, chunk, **how)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    found = scored(model, tokens[:100], 1, **how)
    torch.testing.assert_close(found, expected[:99], atol=2e-4, rtol=1e-4)


KINDS = {
    "mistral": {},  # a window of its own
    "gemma3_text": {},  # windows in some layers, each kind with its base
    "smollm3": {},  # layers without rotation
    "llama4_text": {},  # chunks, and layers without rotation
    "gpt_oss": {},  # sinks of its own, as logits
    "qwen3_next": {},  # layers without keys
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_forgets(kind: str) -> None:
    model, tokens = decoder(kind, **KINDS[kind]), ids(320)[0]
    losses, memory = [], []
    with lh.stream(model, sinks=SINKS, window=20) as s:
        for block in tokens.split(40):
            losses.append(s.score(block))
            memory.append(s.memory)
    assert 0 < max(memory[4:]) <= 1.05 * max(memory[:4])  # eviction waits for a few tokens
    torch.testing.assert_close(
        scored(model, tokens, 64, sinks=SINKS, window=20), torch.cat(losses), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sinks_stay_in_layers_with_windows_of_their_own(kind: str) -> None:
    model, losses = decoder(kind), []
    own = [mask.size for one in lh.scheme_of(model).schemes for mask in one.mask[1:]]
    text = ids(4 * WINDOW)[0]
    other = torch.cat([(text[:2] + 1) % 50, text[2:]])  # other sinks
    with lh.stream(model, sinks=2, window=min(own) // 2) as stream:
        for one in (text, other):
            stream.reset()
            losses.append(torch.as_tensor(stream.score(one))[-WINDOW:])
    assert not torch.allclose(*losses, atol=1e-5)


def test_greedy_is_the_likeliest_of_each_forward(rope: Any) -> None:
    model, tokens = rope[0], text(300)
    with lh.stream(model, sinks=SINKS, window=60) as s:
        s.feed(tokens)
        made = list(s.generate_ids(40))
        assert s.tokens == 340
    with lh.patched(model, "rope(remap=streaming(4, 60))"), torch.no_grad():
        whole = torch.cat([tokens, torch.tensor(made)])
        said = model(whole[None], use_cache=False).logits[0]
    assert made == said[299:-1].argmax(-1).tolist()


def test_what_was_given_out_has_been_read(rope: Any) -> None:
    model, tokens, made = rope[0], text(300), []
    with lh.stream(model, sinks=SINKS, window=60) as s:
        s.feed(tokens)
        for token in s.generate_ids():
            made.append(token)
            if len(made) == 5:
                break
        assert s.tokens == 305
        after = s.score(tokens[:50])
    with lh.stream(model, sinks=SINKS, window=60) as s:
        s.feed([*tokens.tolist(), *made])
        torch.testing.assert_close(s.score(tokens[:50]), after, atol=2e-4, rtol=1e-4)


def test_draws_follow_the_seed(rope: Any) -> None:
    def drawn(**how: Any) -> list[int]:
        with lh.stream(rope[0], window=100) as s:
            s.feed(text(200))
            return list(s.generate_ids(10, **how))

    once = drawn(temperature=2.0, seed=1)
    assert drawn(temperature=2.0, seed=1) == once
    assert drawn(temperature=2.0, seed=2) != once
    assert drawn(temperature=2.0, top_p=1e-9, seed=2) == drawn()  # only the likeliest is left


def test_a_text_ends_where_the_model_ends_it(rope: Any) -> None:
    model, tokenizer = rope
    with lh.stream(model, tokenizer, window=100) as s:
        s.feed(text(300))
        plain = list(s.generate_ids(20))
    end = plain[7]
    ended = copy.copy(tokenizer)
    ended.eos_token = ended.convert_ids_to_tokens(end)
    with lh.stream(model, ended, window=100) as s:
        s.feed(text(300))
        made = list(s.generate_ids(20))
        assert made == plain[: plain.index(end)]
        assert s.tokens == 300 + len(made)  # the end itself was not read


def test_text_goes_in_and_comes_out(rope: Any) -> None:
    model, tokenizer = rope
    with lh.stream(model, tokenizer, window=100) as s:
        s.feed("def main():\n")
        begun = s.tokens
        made = list(s.generate_ids(50))
        s.reset()
        assert s.tokens == 0 and s.memory == 0 and s.rate == 0
        s.feed("def main():\n")
        assert s.tokens == begun
        assert "".join(s.generate(50)) == tokenizer.decode(made)
        assert s.rate > 0


def test_a_closed_stream_leaves_the_model_as_it_was(rope: Any) -> None:
    model, tokens = rope[0], text(300)
    with torch.no_grad():
        before = model(tokens[None]).logits
    own = lh.scheme_of(model)
    s = lh.stream(model, window=100)
    assert "streaming(4, 100)" in str(lh.scheme_of(model))
    s.feed(tokens)
    s.close()
    s.close()
    with pytest.raises(UserError, match="closed"):
        s.feed(tokens)
    with pytest.raises(KeyError), lh.stream(model, window=100) as s:
        raise KeyError
    for refused in ({"window": 1000}, {"scheme": "rope(remap=rerope(50))"}, {"scheme": "alibi()"}):
        with pytest.raises(UserError):
            lh.stream(model, **refused)  # type: ignore[arg-type]
    assert lh.scheme_of(model) == own
    with torch.no_grad():
        assert torch.equal(model(tokens[None]).logits, before)


def test_what_was_broken_off_says_so(rope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = rope[0], text(100)
    with lh.stream(model, window=100) as s:
        s.feed(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.feed(tokens)
        with pytest.raises(UserError, match="was interrupted"):
            s.feed(tokens)
        s.reset()
        s.feed(tokens)
        assert s.tokens == 100


def _interrupted(*args: Any, **more: Any) -> Any:
    raise KeyboardInterrupt


def test_other_schemes_that_forget(rope: Any) -> None:
    with lh.stream(rope[0], scheme="rope(remap=lm_infinite(60, 4))") as s:
        s.feed(text(600), chunk=100)
        held = s.memory
        s.feed(text(600), chunk=100)
        assert s.memory == held
        assert "lm_infinite(60" in str(lh.scheme_of(rope[0]))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({}, "1024 positions, but the checkpoint was trained to 256"),
        ({"sinks": 4, "window": 253}, "257 positions"),
        ({"sinks": -1}, "sinks"),
        ({"window": 0}, "window"),
        ({"scheme": "rope()"}, "grow without end"),
    ],
)
def test_mistakes_on_opening(rope: Any, how: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        lh.stream(rope[0], **how)


def test_mistakes_on_the_way(rope: Any) -> None:
    with lh.stream(rope[0], sinks=4, window=252) as s:
        with pytest.raises(UserError, match="feed the stream first"):
            s.generate_ids(5)
        s.feed([])
        assert s.tokens == 0
        for wrong, told in (
            ([256], "0 to 255"),
            ([-1], "0 to 255"),
            (torch.zeros(2, 5, dtype=torch.long), "one row"),
            ("text", "tokenizer"),
        ):
            with pytest.raises(UserError, match=told):
                s.feed(wrong)
        with pytest.raises(UserError, match="chunk"):
            s.feed([1], chunk=0)
        s.feed(torch.ones(1, 3, dtype=torch.long))
        with pytest.raises(UserError, match="tokenizer"):
            s.generate(5)
        with pytest.raises(UserError, match="temperature"):
            s.generate_ids(5, temperature=-1.0)
        with pytest.raises(UserError, match="top_p"):
            s.generate_ids(5, temperature=1.0, top_p=0.0)


@pytest.mark.parametrize("name", ["tiny-alibi", "tiny-learned"])
def test_models_without_rotation_are_refused(name: str) -> None:
    model, _ = lh.load(name, device="cpu", quiet=True)
    with pytest.raises(UserError, match="use a RoPE model"):
        lh.stream(model, window=100)


def test_encoders_and_bare_trunks_are_refused() -> None:
    from transformers import AutoModel, ModernBertConfig, T5Config

    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    encoder = ModernBertConfig(
        **small, vocab_size=97, intermediate_size=96, max_position_embeddings=WINDOW,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    two = T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    for model, told in (
        (AutoModel.from_config(encoder), "forwards"),
        (AutoModel.from_config(two), "use a decoder"),
        (decoder("llama").model, "head"),
    ):
        with pytest.raises(UserError, match=told):
            lh.stream(model.eval(), window=20)


def test_rotary_positions_that_can_not_be_patched_are_not_denied() -> None:
    """GPT-J rotates, but by tables inside its attention."""
    with pytest.raises(UserError, match=r"that longitude can patch, and GPTJ"):
        lh.stream(decoder("gptj"), window=32)
