"""Tables of positions written out longer: stock transformers then reads what a patch reads."""

from pathlib import Path

import pytest
import torch

from longitude import UserError, parse
from longitude.hf.families.learned import resize_positions
from tests.hf.families.models import TABLES, out, tiny, tokens, under

GROWN = ["hierarchical(16)", "learned_interpolated(16, 4)", "learned_tiled(16)"]


@pytest.mark.parametrize("text", GROWN)
@pytest.mark.parametrize("kind", TABLES)
def test_the_longer_table_is_what_the_patch_reads(kind: str, text: str, tmp_path: Path) -> None:
    model, ids = tiny(kind), tokens(60, batch=2)
    resize_positions(model, parse(text), 60).save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path).eval()
    with under(model, text):
        expected = out(model, ids)
    torch.testing.assert_close(out(stock, ids), expected, atol=1e-6, rtol=1e-6)


def test_refusals() -> None:
    with pytest.raises(UserError, match="reaches 256 positions, but 500"):
        resize_positions(tiny("gpt2"), parse("hierarchical(16)"), 500)
    with pytest.raises(UserError, match="no table of positions"):
        resize_positions(tiny("bloom"), parse("hierarchical(16)"), 100)
