"""Rows read together against each row read alone, for caches of every kind."""

from __future__ import annotations

import pytest
import torch

from longitude.core.validate import UserError
from longitude.reading.forward import Rows
from tests.hf.tiny import decoder
from tests.reading.tiny import LAYOUT, windows

# states of linear attention, convolutions, latent keys, chunks and windows of the model's own
KINDS = ["qwen3_next", "lfm2", "deepseek_v3", "llama4_text", "gpt_oss", "gemma2"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_are_read_as_if_alone(kind: str) -> None:
    m = decoder(kind, max_position_embeddings=256)
    rows = [LAYOUT.row(window) for window in ([], *windows(9, 4, 17, 9))]
    read = Rows(m, rows)
    said = [read(None), read(31), read(32)]
    for place, row in enumerate(rows):
        alone = m(torch.tensor([[*row, 31, 32]])).logits[0, -3:]
        torch.testing.assert_close(
            torch.stack([step[place] for step in said]), alone, rtol=1e-4, atol=1e-5
        )


def test_a_cache_of_a_models_own_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="can't read a text in windows"):
        Rows(decoder("minimax"), windows(5, 9))(None)
