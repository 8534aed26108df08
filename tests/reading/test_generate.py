"""transformers' own generate over a source of logits: its options hold, and the model stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longitude.core.validate import UserError
from longitude.reading.generate import generate_tokens
from longitude.reading.nbce import Nbce, NbceSource
from tests.reading.tiny import LAYOUT, model, windows


def test_generate_decides_how_tokens_are_chosen_and_when_to_stop() -> None:
    from transformers import StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    m, texts = model("llama"), windows(9, 12)

    def run(**options: Any) -> list[int]:
        made = NbceSource(m, LAYOUT, texts, Nbce(top_p=1.0, beta=0.0))
        options.setdefault("max_new_tokens", 6)
        return generate_tokens(m, made, LAYOUT.tail, **options)

    class Heard(BaseStreamer):
        def __init__(self) -> None:
            self.parts: list[list[int]] = []

        def put(self, value: Any) -> None:
            self.parts.append(value.flatten().tolist())

        def end(self) -> None:
            self.parts.append([])

    plain, heard = run(), Heard()
    assert run(streamer=heard) == plain
    assert heard.parts == [list(LAYOUT.tail), *([token] for token in plain), []]
    assert run(eos_token_id=plain[2]) == plain[: plain.index(plain[2]) + 1]
    assert plain[0] not in run(bad_words_ids=[[plain[0]]])
    short = StoppingCriteriaList([lambda ids, *_, **__: torch.tensor([ids.shape[1] >= 6])])
    assert run(stopping_criteria=short) == plain[:2]
    torch.manual_seed(0)
    drawn = {tuple(run(do_sample=True, temperature=5.0)) for _ in range(4)}
    assert len(drawn) > 1
    for more in ({"num_beams": 2}, {"assistant_model": m}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(UserError, match="is one row"):
            run(**more)


def test_the_model_is_left_as_it_was() -> None:
    m = model("llama")
    before = dict(vars(m))
    generate_tokens(m, NbceSource(m, LAYOUT, windows(5, 5), Nbce()), [3], max_new_tokens=2)
    assert {k: id(v) for k, v in vars(m).items()} == {k: id(v) for k, v in before.items()}


def test_a_checkpoints_settings_for_draws_are_not_warned_of(
    transformers_warnings: list[str],
) -> None:
    m = copy.deepcopy(model("llama"))
    m.generation_config.do_sample, m.generation_config.temperature = True, 0.3
    m.generation_config.top_p, m.generation_config.pad_token_id = 0.5, None
    made = NbceSource(m, LAYOUT, windows(5, 5), Nbce())
    assert generate_tokens(m, made, [3], max_new_tokens=2) and not transformers_warnings
