"""NBCE against its formulas written down once more, row by row, in float64 and without a cache."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.eval.prefill import lm_head
from longitude.eval.tasks.passkey import QUESTION, passkey, retrieved
from longitude.reading import nbce
from longitude.reading.generate import Step, generate_tokens
from longitude.reading.nbce import Nbce, NbceSource, nucleus, pool
from tests.reading.keys import cut, share_found, text_of
from tests.reading.tiny import LAYOUT, model, windows

KINDS = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "opt", "bloom", "mpt", "falcon"]
WAYS = [
    Nbce(),
    Nbce(pooling="mean", beta=3.0),
    Nbce(pooling="max"),
    Nbce(beta=0.0, eta=0.0, top_p=0.5),
    Nbce(beta=-0.5, eta=2.0, top_p=1.0),
]


def by_hand(
    rows: list[list[float]], empty: list[float], how: Nbce, last: int | None
) -> tuple[list[float], list[float], int]:
    """The formulas, one number at a time: logits, entropies, the window."""

    def logs(row: list[float]) -> list[float]:
        most = max(row)
        total = most + math.log(sum(math.exp(x - most) for x in row))
        return [x - total for x in row]

    def kept(row: list[float]) -> list[float]:
        left, mass = set(), 0.0
        for token in sorted(range(len(row)), key=lambda t: -row[t]):
            if mass >= how.top_p:
                break
            left.add(token)
            mass += math.exp(row[token])
        return [x if token in left else -math.inf for token, x in enumerate(row)]

    whole = [logs(row) for row in rows]
    cut = [kept(row) for row in whole]
    entropies = [-sum(math.exp(x) * max(x, -100.0) for x in row) for row in cut]
    scores = [h - (how.eta if i == last else 0.0) for i, h in enumerate(entropies)]
    window = scores.index(min(scores))
    without = kept(logs(empty))
    if how.pooling == "mean":
        without = logs(empty)
        chosen = [sum(column) / len(rows) for column in zip(*whole, strict=True)]
    elif how.pooling == "max":
        chosen = [max(column) for column in zip(*cut, strict=True)]
    else:
        chosen = cut[window]
    merged = [
        (1 + how.beta) * p - how.beta * q if q > -100 else p
        for p, q in zip(chosen, without, strict=True)
    ]
    return merged, entropies, window


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("last", [None, 2])
def test_pooling_is_the_formula(how: Nbce, last: int | None) -> None:
    rng = torch.Generator().manual_seed(3)
    rows = 3 * torch.randn(5, 40, generator=rng, dtype=torch.float64)
    empty = 3 * torch.randn(40, generator=rng, dtype=torch.float64)
    made = pool(rows, empty, how, last)
    logits, entropies, window = by_hand(rows.tolist(), empty.tolist(), how, last)
    torch.testing.assert_close(made[0], torch.tensor(logits, dtype=torch.float64))
    torch.testing.assert_close(made[1], torch.tensor(entropies, dtype=torch.float64))
    assert made[2] == window


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_the_nucleus_is_transformers_own(top_p: float) -> None:
    from transformers import TopPLogitsWarper

    logs = (3 * torch.randn(6, 50, dtype=torch.float64)).log_softmax(-1)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(6, 1, dtype=torch.long), logs)  # type: ignore[arg-type]
    torch.testing.assert_close(nucleus(logs, top_p), theirs, rtol=0, atol=0)


@torch.no_grad()
def straightforward(m: Any, rows: list[list[int]], how: Nbce, new: int) -> list[tuple[int, int]]:
    """Tokens and windows, every row read from its beginning for every token."""
    said: list[int] = []
    found, last = [], None
    for _ in range(new):
        every = [m(torch.tensor([row + said])).logits[0, -1].tolist() for row in rows]
        logits, _, last = by_hand(every[1:], every[0], how, last)
        said.append(max(range(len(logits)), key=lambda token: logits[token]))
        found.append((said[-1], last))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_the_straightforward_one(kind: str) -> None:
    m, texts = model(kind), windows(9, 4, 17, 9)
    how = Nbce(eta=0.5)
    expected = straightforward(m, [LAYOUT.row(w) for w in ([], *texts)], how, 5)
    ways = [{}, {"room": 40_000, "at_once": 40}, {"at_once": 20}, {"room": 0}]
    for options in ways if kind == "llama" else ways[:2]:
        made = NbceSource(m, LAYOUT, texts, how, **options)
        found: list[tuple[int, int]] = []

        def add(token: int, trace: dict[str, Any], found: Any = found) -> None:
            found.append((token, trace["window"]))

        generate_tokens(m, made, LAYOUT.tail, add, max_new_tokens=5, eos_token_id=None)
        assert found == expected


def test_rows_without_room_are_read_again_and_hold_nothing() -> None:
    m = model("llama")
    made = NbceSource(m, LAYOUT, windows(9, 4), Nbce(), room=0)
    made(None)
    assert made.rows.cached == 0 and all(group.cache is None for group in made.rows.groups)


def test_the_common_beginning_is_read_once() -> None:
    m, read = model("llama"), []
    lm_head(m)  # tries it on a few tokens, once
    hook = m.model.embed_tokens.register_forward_hook(
        lambda _, ids, out: read.append(ids[0].numel())
    )
    NbceSource(m, LAYOUT, windows(9, 9, 9), Nbce())(None)
    hook.remove()
    columns = 9 + len(LAYOUT.tail)  # four rows, the one without a context padded
    assert sum(read) == len(LAYOUT.head) + 4 * columns


@pytest.mark.parametrize("kind", KINDS)
def test_one_window_is_the_model_itself(kind: str) -> None:
    m, (window,) = model(kind), windows(20)
    row = torch.tensor([LAYOUT.row(window)])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = m.generate(row, attention_mask=torch.ones_like(row), **options)
    made = NbceSource(m, LAYOUT, [window], Nbce())
    assert generate_tokens(m, made, LAYOUT.tail, **options) == expected[0, row.shape[1] :].tolist()
    with torch.no_grad():
        logits = m(row).logits[0, -1]
    torch.testing.assert_close(NbceSource(m, LAYOUT, [window], Nbce())(None)[0], logits)


def test_a_patched_model_reads_rows_of_one_length_together() -> None:
    m, texts = model("llama"), windows(30, 12, 30)
    with lh.patched(m, "rope(remap=leaky_rerope(8, 4))"):
        expected = straightforward(m, [LAYOUT.row(w) for w in ([], *texts)], Nbce(), 3)
        made = NbceSource(m, LAYOUT, texts, Nbce())
        tokens = generate_tokens(m, made, LAYOUT.tail, max_new_tokens=3, eos_token_id=None)
    assert tokens == [token for token, _ in expected]
    assert sorted(len(group.rows) for group in made.rows.groups) == [1, 1, 2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"beta": -2}, "beta is -1 or more"),
        ({"eta": -1}, "eta is 0 or more"),
        ({"top_p": 0}, "top_p is a share"),
        ({"pooling": "sum"}, "pooled by"),
    ],
)
def test_what_makes_no_sense(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Nbce(**given)


def test_an_answer_streams_and_tells_its_windows(tiny_rope: Any) -> None:
    m, tokenizer = tiny_rope
    asked, texts = cut(2, seed=5)
    told: list[Step] = []
    made = nbce.answer(m, tokenizer, texts, QUESTION, max_new_tokens=7, tell=told.append)
    assert retrieved(asked, made.text) and tuple(told) == made.steps
    assert (
        made.text
        == "".join(step.text for step in told)
        == tokenizer.decode([step.token for step in told])
    )
    right = [str(asked.key) in text for text in texts]
    digits = [step for step in told if step.text.isdigit()]
    assert digits and all(right[step.window] for step in digits if step.window is not None)
    for step in told:
        assert len(step.entropies) == 2 and step.entropy == step.entropies[step.window or 0]
    plain = made.plain()
    assert plain["by"] == "nbce" and plain["windows"] == 2
    assert plain["steps"][0].keys() == {"token", "text", "window", "entropy", "entropies"}


def test_what_can_not_be_read(tiny_rope: Any) -> None:
    m, tokenizer = tiny_rope
    with pytest.raises(UserError, match="a question has words"):
        nbce.answer(m, tokenizer, ["text"], "  ")
    with pytest.raises(UserError, match="got none"):
        nbce.answer(m, tokenizer, [], "why?")
    with pytest.raises(UserError, match="use windows of 206 tokens at most"):
        nbce.answer(m, tokenizer, ["x" * 300], "Which letter is it?", max_new_tokens=30)


def test_keys_are_found_in_four_windows(tiny_rope: Any) -> None:
    assert share_found(nbce.answer, tiny_rope, 4, range(2)) == 1


@pytest.mark.slow
def test_keys_are_found_in_sixteen_windows(tiny_rope: Any) -> None:
    assert share_found(nbce.answer, tiny_rope, 16, range(50)) >= 0.9


def test_the_model_alone_finds_no_key_beyond_its_window(tiny_rope: Any) -> None:
    from longitude.eval.prefill import greedy_batch

    m, tokenizer = tiny_rope
    rng = random.Random(0)
    asked = [passkey(640, rng=rng, depth=rng.uniform(0, 0.5), form="short") for _ in range(3)]
    prompts = [torch.tensor(tokenizer(one.prompt)["input_ids"]) for one in asked]
    said = [tokenizer.decode(ids) for ids in greedy_batch(m, prompts, 7)]
    assert not any(map(retrieved, asked, said))
    assert text_of(asked[0]) in asked[0].prompt
