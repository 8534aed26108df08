"""The checkpoints of the default run: stock transformers reads them, and they know their window."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import longitude
from longitude.core.text import parse
from longitude.eval.perplexity import tail, token_losses
from longitude.eval.tasks.passkey import passkey, retrieved
from longitude.training.data import excerpts, gather
from longitude.training.to_hf import stock_model

ASSETS = Path(longitude.__file__).parent / "assets"
KINDS = {"tiny-rope": "llama", "tiny-alibi": "bloom", "tiny-learned": "gpt2"}
WINDOW = 256


@pytest.fixture(scope="module", params=KINDS)
def asset(request):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ASSETS / request.param
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return request.param, model, AutoTokenizer.from_pretrained(folder)


def test_there_are_no_others():
    assert {folder.name for folder in ASSETS.iterdir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_is_small_and_says_how_it_was_made(name):
    assert sum(file.stat().st_size for file in (ASSETS / name).iterdir()) <= 5_000_000
    told = (ASSETS / name / "README.md").read_text(encoding="utf-8")
    command = re.search(r'longitude train --scheme "(.+)" .*--length 256', told)
    assert command and f"--out {name}" in told
    block = "gpt" if "--block gpt" in told else "llama"
    assert stock_model(parse(command[1]), block).kind == KINDS[name]


def test_transformers_knows_what_each_is(asset):
    name, model, tokenizer = asset
    assert model.config.model_type == KINDS[name]
    assert model.num_parameters() < 2.5e6
    assert tokenizer("Grün").input_ids == list("Grün".encode())


def test_passkeys_inside_the_window_are_told(asset):
    _, model, tokenizer = asset
    asked = [passkey(WINDOW, rng=random.Random(seed)) for seed in range(40)]
    told = [_said(model, tokenizer, one.prompt, len(one.answer)) for one in asked]
    right = sum(map(retrieved, asked, told))
    assert right >= 0.95 * len(asked)


def test_text_inside_the_window_is_known(asset):
    _, model, _ = asset
    text = excerpts(gather(), WINDOW + 1, 48, seed=0)
    losses = token_losses(lambda tokens: model(tokens).logits, text)
    assert tail(losses, WINDOW // 2) < 1.4  # nats a byte; without a context it is over 3


def _said(model, tokenizer, prompt: str, tokens: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.input_ids.shape[1] :])
