"""What a model says, against transformers' own greedy `generate`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import longitude.hf as lh
from longitude import UserError
from longitude.eval import prefill
from longitude.eval.prefill import eos_tokens, greedy, greedy_batch
from longitude.eval.tasks.passkey import passkey
from tests.eval.test_perplexity import model, tokens

NEW = 6
CASES = [
    ("tiny-rope", None, 240),
    ("tiny-rope", "rope(remap=leaky_rerope(64, 16))", 200),
    ("tiny-rope", "rope(frequencies=yarn(4, original=256))", 300),
    ("tiny-rope", "rope(frequencies=dynamic_ntk(256))", 300),
    ("tiny-alibi", None, 300),
    ("tiny-learned", None, 200),
]


def generated(m: Any, prompt: Tensor) -> list[int]:
    """By transformers, up to the byte that ends a text."""
    with torch.no_grad():
        out = m.generate(prompt[None], max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
    return out.tolist()[: out.tolist().index(0)] if 0 in out else out.tolist()


def prompts(n: int, count: int) -> list[Tensor]:
    """Passkeys: their answers are digits, and differ."""
    made = [passkey(n, rng=seed, form="short").prompt for seed in range(count)]
    return [torch.tensor(list(prompt.encode())) for prompt in made]


@pytest.mark.parametrize(("name", "scheme", "n"), CASES)
def test_it_is_what_generate_says(
    name: str, scheme: str | None, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, asked = model(name), [*prompts(n, 2), tokens(n - 30)]
    long = max(len(prompt) for prompt in asked) + NEW
    with nullcontext() if scheme is None else lh.patched(m, scheme, length=long):
        want = [generated(m, prompt) for prompt in asked]
        assert greedy_batch(m, asked, NEW) == want
        monkeypatch.setattr(prefill, "chunk_for", lambda *_: 100)
        assert greedy(m, asked[0], NEW) == want[0]
    assert len({tuple(row) for row in want}) > 1, "the test would not see rows exchanged"


def test_rows_of_one_length_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model("tiny-rope")
    asked = [tokens(60), tokens(50), tokens(60) // 2, tokens(50) // 2, tokens(60) // 3]
    monkeypatch.setattr(prefill, "CPU_BATCH_TOKENS", 2 * 64 + 1)
    shapes: list[tuple[int, ...]] = []
    hook = m.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape))
    )
    together = greedy_batch(m, asked, 4, stop=())
    hook.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [(2, 60), (1, 60), (2, 50)]
    assert together == [greedy(m, prompt, 4, stop=()) for prompt in asked]


def test_a_row_ends_without_ending_the_others() -> None:
    m = model("tiny-rope")
    asked = [tokens(60), tokens(60) // 2]
    first, second = greedy_batch(m, asked, 8, stop=())
    assert len(first) == len(second) == 8
    end = next(token for token in first if token not in second)
    assert greedy_batch(m, asked, 8, stop={end}) == [first[: first.index(end)], second]
    assert greedy_batch(m, asked, 8, stop={first[0], second[0]}) == [[], []]


def test_a_model_ends_by_itself() -> None:
    assert eos_tokens(model("tiny-rope")) == {0}
    m = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)[0]
    m.generation_config.eos_token_id = [3, 7]  # type: ignore[union-attr]
    assert eos_tokens(m) == {3, 7}
    m.generation_config.eos_token_id = None  # type: ignore[union-attr]
    assert eos_tokens(m) == set()
    assert len(greedy(m, tokens(20), 3)) == 3


def test_nothing_asked_is_nothing_said() -> None:
    m = model("tiny-rope")
    assert greedy_batch(m, [], 3) == []
    with pytest.raises(UserError, match="1 token or more"):
        greedy(m, tokens(5), 0)
    with pytest.raises(UserError, match=r"prompts of \[5, 0\]"):
        greedy_batch(m, [tokens(5), tokens(5)[:0]], 2)
