"""Biases and sinusoids as transformers makes them: T5, ALiBi, DeBERTa, Whisper, Marian, …"""

from collections.abc import Iterator

import pytest
import torch
from transformers import MarianConfig, MarianModel, PegasusConfig, PegasusModel, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.whisper.modeling_whisper import sinusoids

from longitude.parts import Alibi, Sinusoidal
from longitude.parts.biases import bucket, slopes
from longitude.parts.embeddings import sinusoid
from longitude.parts.relative_vectors import log_bucket

from .scripted import deberta_v2

HALF = 2**-24  # relative error of one rounding to float32


@pytest.mark.parametrize("both", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize("buckets", [4, 8, 16, 32, 64, 128, 320])
@pytest.mark.parametrize("reach", [161, 200, 800])  # past the exact buckets of each
@pytest.mark.parametrize("shrunk", [False, True])
def test_t5_buckets(both: bool, buckets: int, reach: int, shrunk: bool) -> None:
    reach = reach if not shrunk else reach * buckets // 320 + 1  # … and only just past
    config = T5Config(
        d_model=1,
        d_kv=1,
        num_heads=1,
        is_decoder=not both,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=reach,
    )
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    torch.nn.init.zeros_(module.relative_attention_bias.weight).data += torch.arange(buckets)[
        :, None
    ]
    theirs = module.compute_bias(
        1, 2001, past_seen_tokens=1000
    ).flatten()  # a bucket's bias: itself
    ahead = torch.arange(-1000, 1001)  # theirs counts from query to key, ours from key to query
    assert torch.equal(bucket(-ahead, buckets, reach, both).float(), theirs)


@pytest.mark.parametrize("heads", range(1, 129))
def test_alibi_slopes(heads: int) -> None:
    ours = slopes(heads).float()
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    # BLOOM raises a rounded base to up to 128 powers, MPT raises 2 to an exact one
    torch.testing.assert_close(bloom, ours, rtol=16 * HALF, atol=0)
    torch.testing.assert_close(mpt, ours, rtol=2 * HALF, atol=0)
    if heads in (1, 2, 4, 8):  # whole powers of two: nothing is rounded
        assert torch.equal(bloom, ours) and torch.equal(mpt, ours)


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 71])
def test_alibi_terms(heads: int) -> None:
    n = 40
    q, pos = torch.zeros(1, heads, n, 4), torch.arange(n)[None]
    h, i, j = torch.arange(heads).view(-1, 1, 1), torch.arange(n).view(-1, 1), torch.arange(n)
    term = Alibi().term(q, q, pos, pos, {}, 1.0)(torch.zeros((), dtype=torch.int64), h, i, j)
    # both of theirs differ from ours by a constant a row, which the softmax does not see
    bloom = build_alibi_tensor(torch.ones(1, n), heads, torch.float32)
    mpt = build_mpt_alibi_tensor(heads, n)
    for theirs in (bloom, mpt):
        gap = (term - theirs).tril()
        row = gap[:, :, :1].expand(heads, n, n).tril()
        torch.testing.assert_close(gap, row, rtol=0, atol=32 * HALF * n)


@pytest.mark.parametrize("buckets", [4, 7, 8, 20, 24, 36, 64, 128, 255, 256])
def test_deberta_log_buckets(buckets: int) -> None:
    r = torch.arange(-3000, 3001)
    for span in (buckets // 2 + 2, 130, 236, 256, 512, 513, 606, 1000, 1024):
        theirs = deberta_v2.make_log_bucket_position(r, buckets, span)
        assert torch.equal(log_bucket(r, buckets, span), theirs.long()), span


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("dim", [4, 64, 384])
def test_sinusoids_of_whisper(dim: int) -> None:
    theirs = sinusoids(1500, dim)
    ours = sinusoid(torch.arange(1500), dim, 10000, "concatenated", "endpoint")
    assert theirs.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dim", [8, 64])
def test_sinusoids_of_fairseq(dim: int) -> None:
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(512, dim)
    pos = torch.arange(512)
    ours = sinusoid(pos, dim, 10000, "concatenated", "endpoint").float()
    # theirs rounds the frequencies' exponents (up to ln 10000) and the angles to float32
    assert ((ours - theirs).abs() <= (1 + pos[:, None]) * 16 * HALF).all()


@pytest.mark.parametrize("made", [(MarianConfig, MarianModel), (PegasusConfig, PegasusModel)])
@pytest.mark.parametrize("dim", [8, 32])
def test_sinusoids_of_marian_and_pegasus(made: tuple[type, type], dim: int) -> None:
    config, model = made
    small = {
        f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "ffn_dim")
    }
    small |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes = {"vocab_size": 8, "d_model": dim, "max_position_embeddings": 300}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    theirs = model(config(**small, **sizes, **special)).encoder.embed_positions.weight
    ours = sinusoid(torch.arange(300), dim, 10000, "concatenated", "paper").float()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=HALF)
    other = sinusoid(torch.arange(300), dim, 10000, "concatenated", "endpoint").float()
    assert (other - theirs).abs().max() > 0.1


@pytest.mark.parametrize("dim", [2, 8, 32])
def test_sinusoids_of_distilbert(dim: int) -> None:
    theirs = create_sinusoidal_embeddings(300, dim, torch.empty(300, dim))
    ours = Sinusoidal().embed(torch.zeros(1, 300, dim), torch.arange(300)[None], {})[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=HALF)
