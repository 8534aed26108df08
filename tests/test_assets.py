"""The checkpoints of the default run: stock transformers reads them, and they know their window."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

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
    assert stock_model(parse(command[1]), block)[0] == KINDS[name]


def test_transformers_knows_what_each_is(asset):
    name, model, tokenizer = asset
    assert model.config.model_type == KINDS[name]
    assert model.num_parameters() < 2.5e6
    assert tokenizer("Grün").input_ids == list("Grün".encode())


def test_passkeys_inside_the_window_are_told(asset):
    _, model, tokenizer = asset
    questions = [passkey(WINDOW, rng=random.Random(seed)) for seed in range(20)]
    by_length: dict[int, list[Any]] = {}
    for question in questions:
        by_length.setdefault(len(question.prompt), []).append(question)
    right = 0
    for group in by_length.values():
        answers = _continuations(model, tokenizer, group)
        right += sum(map(retrieved, group, answers))
    assert right >= 0.95 * len(questions)


def test_text_inside_the_window_is_known(asset):
    _, model, _ = asset
    text = excerpts(gather(), WINDOW + 1, 12, seed=0)
    losses = token_losses(lambda tokens: model(tokens).logits, text)
    assert tail(losses, WINDOW // 2) < 1.4  # nats a byte; without a context it is over 3


def _continuations(model, tokenizer, questions: list[Any]) -> list[str]:
    """What greedy decoding appends to prompts of one length."""
    ids = tokenizer([q.prompt for q in questions], return_tensors="pt")
    new = len(questions[0].answer)  # bytes; a table of positions ends with the window
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=new, do_sample=False)
    return [tokenizer.decode(row[ids.input_ids.shape[1] :]) for row in out]
