"""The decoder: it is what it says, it is causal, and it compiles in one piece where it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.training.lab.model import SIZES, Decoder, DecoderConfig, trainable_schemes
from longitude.training.lab.run import decoder_config

SMALL = {"length": 32, "layers": 2, "dim": 16, "heads": 2, "hidden": 32}
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))


def by_hand(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The llama block without positions, written out."""
    x, w = model.tokens.weight[tokens], dict(model.named_parameters())

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    for i in range(model.config.layers):
        h = norm(x, f"blocks.{i}.norm1.weight") @ w[f"blocks.{i}.attend.qkv.weight"].T
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in h.split(16, -1))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
        h = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + h @ w[f"blocks.{i}.attend.out.weight"].T
        h = norm(x, f"blocks.{i}.norm2.weight")
        gate, up = (h @ w[f"blocks.{i}.feed.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"blocks.{i}.feed.down.weight"].T
    return norm(x, "norm.weight") @ model.tokens.weight.T


def test_the_llama_block_is_the_one_written_out():
    model = Decoder(DecoderConfig("causal()", **SMALL))
    torch.testing.assert_close(model(TOKENS), by_hand(model, TOKENS))


@pytest.mark.parametrize(
    ("scheme", "block"),
    [(s, "llama") for s in trainable_schemes(32, 2)]
    + [(s, "gpt") for s in ("rope()", "learned(32)", "alibi()", "t5()", "causal()")],
)
def test_every_trainable_encoding_trains_and_never_looks_ahead(scheme, block):
    model = Decoder(DecoderConfig(scheme, **SMALL, block=block))
    later = TOKENS.clone()
    later[:, 12:] += 1
    torch.testing.assert_close(model(TOKENS)[:, :12], model(later % 256)[:, :12])
    pos = model.positions.positions(24, torch.Generator().manual_seed(1))
    model(TOKENS, pos, TOKENS).backward()
    unreached = {name for name, p in model.named_parameters() if p.grad is None}
    assert not unreached


def test_the_loss_is_the_weighted_sum_of_each_tokens():
    model = Decoder(DecoderConfig("rope()", **SMALL))
    weights = torch.rand(2, 24)
    each = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten(), reduction="none")
    torch.testing.assert_close(model(TOKENS, None, TOKENS, weights), each @ weights.flatten())


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(1)
    one = Decoder(DecoderConfig("t5()", **SMALL), seed=5).state_dict()
    torch.manual_seed(2)
    other = Decoder(DecoderConfig("t5()", **SMALL), seed=5).state_dict()
    third = Decoder(DecoderConfig("t5()", **SMALL), seed=6).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], third[name]) for name in one)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_weights_they_say(size):
    said = {"nano": 0.36e6, "tiny": 2.3e6, "small": 14e6, "125m": 128e6}[size]
    for block in ("llama", "gpt"):
        with torch.device("meta"):
            made = Decoder(decoder_config(parse("rope()"), 256, size, block))
        assert sum(p.numel() for p in made.parameters()) == pytest.approx(said, rel=0.06)


@pytest.mark.slow
def test_compiled_is_the_same_and_in_one_graph_where_one_pass_does_it():
    """In a process of its own: a compiler can't look through a run-time type checker."""
    program = Path(__file__).with_name("compiled.py")
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, program], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"block": "bert"}, "no block"), ({"heads": 5}, "even size"), ({"layers": 0}, "at least 1")],
)
def test_a_shape_that_can_not_be_says_so(given, sentence):
    with pytest.raises(UserError, match=sentence):
        DecoderConfig("rope()", **{**SMALL, **given})


def test_tokens_meet_fixed_positions_at_their_size():
    fixed, learned = (Decoder(DecoderConfig(s, **SMALL)) for s in ("sinusoidal()", "learned(32)"))
    assert (fixed.size, learned.size) == (4.0, 1.0)  # √16
    seen = []
    fixed.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    fixed(TOKENS)
    tokens = 4 * fixed.tokens.weight[TOKENS]
    waves = fixed.positions(torch.zeros(2, 24, 16), range(24))
    torch.testing.assert_close(seen[0], tokens + waves)
