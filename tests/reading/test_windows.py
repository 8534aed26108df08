"""Parallel windows against one forward over all tokens with a mask and positions written out, and
for ALiBi against BLOOM's layers written down once more; in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.eval.tasks.passkey import QUESTION, retrieved
from longitude.reading import windows as reading
from longitude.reading.generate import Prompt, Step, generate_tokens
from longitude.reading.windows import WindowsSource
from tests.reading.keys import cut, share_found
from tests.reading.tiny import LAYOUT, model, windows

ROTARY = ["llama", "qwen3", "gpt_neox", "glm", "gpt2", "opt"]
ALIBI = ["bloom", "mpt", "falcon"]
LENGTHS = (9, 4, 17, 9)
HEADLESS = Prompt((), LAYOUT.tail)
SAID = [31, 32, 33]


def written_out(
    layout: Prompt, texts: list[list[int]], align: str, said: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens in a row, their positions, and who sees whom."""
    longest, start = max(map(len, texts)), len(layout.head)
    ids, at, owner = list(layout.head), list(range(start)), [-1] * start
    for index, text in enumerate(texts):
        first = start + (longest - len(text) if align == "right" else 0)
        ids += text
        at += range(first, first + len(text))
        owner += [index] * len(text)
    rest = [*layout.tail, *said]
    ids += rest
    at += range(start + longest, start + longest + len(rest))
    owner += [len(texts)] * len(rest)
    n = len(ids)
    sees = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(i + 1):
            sees[i, j] = owner[j] in (-1, owner[i]) or owner[i] == len(texts)
    return torch.tensor([ids]), torch.tensor([at]), sees


def stepped(source: WindowsSource, said: list[int]) -> tuple[Tensor, list[Any]]:
    """What a source says after the question and after each of these tokens, and the masses."""
    logits, traces = zip(*map(source, [None, *said]), strict=True)
    return torch.stack(logits), [trace["mass"] for trace in traces]


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("align", ["left", "right"])
@pytest.mark.parametrize("layout", [LAYOUT, HEADLESS], ids=["head", "headless"])
@torch.no_grad()
def test_windows_are_one_forward_with_a_mask(kind: str, align: str, layout: Prompt) -> None:
    m, texts = model(kind, "eager"), windows(*LENGTHS)
    ids, at, sees = written_out(layout, texts, align, SAID)
    mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -1e30)[None, None]
    out = m(ids, position_ids=at, attention_mask=mask, output_attentions=True)
    source = WindowsSource(m, layout, texts, align=align, at_once=20)
    said, masses = stepped(source, SAID)
    # eager attention rounds its weights to float32
    torch.testing.assert_close(said, out.logits[0, -len(SAID) - 1 :], rtol=1e-5, atol=1e-5)
    weights = torch.stack(out.attentions).mean((0, 1, 2))[-1]
    ends = [len(layout.head)]
    for text in texts:
        ends.append(ends[-1] + len(text))
    mass = torch.stack([weights[a:b].sum() for a, b in pairwise(ends)])
    torch.testing.assert_close(
        torch.tensor(masses[-1], dtype=torch.float64), mass, rtol=1e-5, atol=1e-6
    )


@torch.no_grad()
def bloom_by_hand(m: Any, ids: Tensor, at: Tensor, sees: Tensor) -> Tensor:
    """BLOOM's logits, ALiBi from positions: q·k/√d - slope · (i - j), as the paper has it."""
    t, heads = m.transformer, m.config.n_head
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
    away = (at[0][:, None] - at[0][None]).double()
    x = t.word_embeddings_layernorm(t.word_embeddings(ids))[0]
    for block in t.h:
        y = block.input_layernorm(x)
        q, k, v = block.self_attention.query_key_value(y).view(len(x), heads, 3, -1).unbind(2)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        scores = (scores - slopes[:, None, None] * away).masked_fill(~sees, -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + block.self_attention.dense(mixed)
        y = block.mlp.dense_h_to_4h(block.post_attention_layernorm(x))
        x = x + block.mlp.dense_4h_to_h(F.gelu(y, approximate="tanh"))
    return m.lm_head(t.ln_f(x))


@pytest.mark.parametrize("align", ["left", "right"])
@pytest.mark.parametrize("layout", [LAYOUT, HEADLESS], ids=["head", "headless"])
def test_alibi_is_the_papers_bias_at_parallel_positions(align: str, layout: Prompt) -> None:
    m, texts = model("bloom"), windows(*LENGTHS)
    expected = bloom_by_hand(m, *written_out(layout, texts, align, SAID))[-len(SAID) - 1 :]
    source = WindowsSource(m, layout, texts, align=align, at_once=20)
    torch.testing.assert_close(stepped(source, SAID)[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ALIBI)
@pytest.mark.parametrize("align", ["left", "right"])
def test_windows_have_no_order(kind: str, align: str) -> None:
    """Windows at the same positions can change places: at positions one after the other, or with a
    bias by their places in the cache, they could not."""
    m, texts = model(kind), windows(*LENGTHS)
    one, _ = stepped(WindowsSource(m, LAYOUT, texts, align=align), SAID)
    other = WindowsSource(m, LAYOUT, texts[::-1], align=align)
    torch.testing.assert_close(one, stepped(other, SAID)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*ROTARY, *ALIBI])
def test_one_window_is_the_model_itself(kind: str) -> None:
    m, (window,) = model(kind), windows(20)
    row = torch.tensor([LAYOUT.row(window)])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = m.generate(row, attention_mask=torch.ones_like(row), **options)
    made = WindowsSource(m, LAYOUT, [window])
    assert generate_tokens(m, made, LAYOUT.tail, **options) == expected[0, row.shape[1] :].tolist()
    with torch.no_grad():
        logits = m(row).logits[0, -1]
    torch.testing.assert_close(WindowsSource(m, LAYOUT, [window])(None)[0], logits)


@pytest.mark.parametrize("kind", [*ROTARY, *ALIBI])
def test_decoding_is_prefill(kind: str) -> None:
    """Tokens said one by one, and the same tokens as the end of the question."""
    m, texts = model(kind), windows(*LENGTHS)
    said, _ = stepped(WindowsSource(m, LAYOUT, texts), SAID)
    for n in range(1, len(SAID) + 1):
        longer = Prompt(LAYOUT.head, (*LAYOUT.tail, *SAID[:n]))
        logits, _ = WindowsSource(m, longer, texts)(None)
        torch.testing.assert_close(logits, said[n], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*ROTARY, *ALIBI])
def test_masses_are_shares(kind: str) -> None:
    m = model(kind)
    for mass in stepped(WindowsSource(m, LAYOUT, windows(*LENGTHS)), SAID)[1]:
        assert len(mass) == len(LENGTHS) and all(x > 0 for x in mass) and sum(mass) < 1


def test_what_can_not_stand_side_by_side() -> None:
    m, sliding = model("llama"), model("gemma3_text")
    with pytest.raises(UserError, match="see the last tokens only"):
        WindowsSource(sliding, LAYOUT, windows(9, 9))
    with (
        lh.patched(m, "rope(remap=leaky_rerope(8, 4))"),
        pytest.raises(UserError, match="read it with nbce"),
    ):
        WindowsSource(m, LAYOUT, windows(9, 9))
    with pytest.raises(UserError, match="'left' or 'right'"):
        WindowsSource(m, LAYOUT, windows(9, 9), align="middle")
    with pytest.raises(UserError, match="keeps more than those"):
        WindowsSource(model("qwen3_next"), LAYOUT, windows(9, 9))


def test_an_answer_streams_and_tells_its_masses(tiny_rope: Any) -> None:
    m, tokenizer = tiny_rope
    asked, texts = cut(2, seed=5)
    told: list[Step] = []
    made = reading.answer(m, tokenizer, texts, QUESTION, max_new_tokens=7, tell=told.append)
    assert retrieved(asked, made.text) and tuple(told) == made.steps
    for step in told:
        assert step.window == step.mass.index(max(step.mass)) and step.entropy is None
    assert made.plain()["steps"][0].keys() == {"token", "text", "window", "mass"}
    with pytest.raises(UserError, match="number 1 of 2 has none"):
        reading.answer(m, tokenizer, ["text", ""], QUESTION)


def test_keys_are_found_in_two_windows(tiny_rope: Any) -> None:
    assert share_found(reading.answer, tiny_rope, 2, range(3)) == 1


@pytest.mark.slow
def test_keys_are_found_in_two_windows_of_fifty_texts(tiny_rope: Any) -> None:
    assert share_found(reading.answer, tiny_rope, 2, range(50)) >= 0.9
