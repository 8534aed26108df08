"""BLOOM, MPT and Falcon-RW: other slopes, and everything else as it was."""

import pytest
import torch
from torch import Tensor

from longitude import parse
from longitude.hf.families.alibi import slopes
from longitude.parts import Alibi, AlibiInterpolated, NtkAlibi
from tests.hf.families.models import (
    asset,
    decoded,
    out,
    padded_pair,
    restored,
    state,
    tail_loss,
    tiny,
    tokens,
    under,
)
from tests.hf.tiny import checkpointed

KINDS = ["bloom", "mpt", "falcon", "falcon, eager"]
STRETCHED = ["alibi_interpolated(4)", "alibi_interpolated(3)", "ntk_alibi(4)", "alibi(steepness=4)"]
SEQUENCE = 16


def model_of(kind: str, heads: int = 4):
    name, _, attention = kind.partition(", ")
    entries = {
        "bloom": {},
        "mpt": {"max_seq_len": SEQUENCE, "use_cache": True},
        "falcon": {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
    }[name]
    shape = {"num_attention_heads": heads, "hidden_size": 8 * heads, "d_model": 8 * heads}
    return tiny(name, "AutoModelForCausalLM", attention or None, **shape, **entries)


def own_text(kind: str) -> str:
    return "alibi_interpolated(0.5)" if kind == "falcon, eager" else "alibi()"


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_slopes_are_the_models(heads):
    """For every number of heads, BLOOM's, MPT's and Falcon's are ours."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt

    ours = slopes(Alibi(), heads).float()
    theirs = bloom(torch.ones(1, 2), heads, torch.float32)[:, 0]
    torch.testing.assert_close(theirs[:, 1] - theirs[:, 0], ours, rtol=1e-6, atol=0)
    if heads > 1:  # MPT's formula has no slope for one head
        theirs = mpt(heads, 2)[:, 0]
        torch.testing.assert_close(theirs[:, 1] - theirs[:, 0], ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize("part", [Alibi(steepness=4), AlibiInterpolated(3), NtkAlibi(5)])
def test_slopes_are_read_off_the_term(part):
    """-term at a distance r is r times the slope."""
    q = torch.zeros(1, 6, 1, 1, dtype=torch.float64)
    far = torch.tensor([[1000]])
    h = torch.arange(6)
    zero = torch.tensor(0)
    term = part.term(q, q, far, far - 1000, {}, 1.0)(zero, h, zero, zero)
    torch.testing.assert_close(-term / 1000, slopes(part, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of bfloat16 on some CPUs
def test_its_own_scheme_is_the_model_bit_for_bit(kind, heads, dtype):
    model = model_of(kind, heads).to(dtype)
    ids, mask = padded_pair(SEQUENCE, 9)
    plain, padded = out(model, ids), out(model, ids, attention_mask=mask)
    with under(model, own_text(kind)):
        assert torch.equal(out(model, ids), plain)
        assert torch.equal(out(model, ids, attention_mask=mask), padded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", STRETCHED)
def test_leaving_restores_everything(kind, text):
    model, ids = model_of(kind), tokens(SEQUENCE, batch=2)
    restored(model, text, lambda: out(model, ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["alibi()", *STRETCHED])
@pytest.mark.parametrize("heads", [4, 6])
def test_the_bias_is_the_formulas(kind, text, heads, monkeypatch):
    """The same model whose builder of the bias is replaced by the formula, for all of it."""
    model, ids = model_of(kind, heads), tokens(40, batch=2)
    with under(model, text):
        got = out(model, ids)
    bias = parse(text).bias[0]  # type: ignore[union-attr]
    m = slopes(bias, heads).float()

    def key_side(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        return (m[:, None] * torch.arange(mask.shape[1])).repeat(len(mask), 1)[:, None].to(dtype)

    def last_back(self, heads: int, length: int, device=None) -> Tensor:
        return m[:, None, None] * torch.arange(1 - 40, 1)

    name = kind.partition(",")[0]
    where = f"transformers.models.{name}.modeling_{name}"
    if name == "mpt":
        monkeypatch.setattr(f"{where}.MptModel.build_mpt_alibi_tensor", last_back)
    else:
        monkeypatch.setattr(f"{where}.build_alibi_tensor", key_side)
    # the formula has no place for the second bias of transformers' eager Falcon
    plain = model_of("falcon" if name == "falcon" else kind, heads)
    expected = out(plain, ids, attention_mask=torch.ones_like(ids))
    close = {"rtol": 0.05, "atol": 0.05} if name == "falcon" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got, expected, **close)  # Falcon keeps its bias in bfloat16


def test_eager_falcons_second_bias_is_mended():
    """transformers' eager Falcon adds its bias twice; under alibi() it is the sdpa one."""
    twice, once, ids = model_of("falcon, eager"), model_of("falcon"), tokens(24)
    assert not torch.allclose(out(twice, ids), out(once, ids), atol=1e-3)
    with under(twice, "alibi()"):
        torch.testing.assert_close(out(twice, ids), out(once, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["alibi()", "alibi_interpolated(4)", "ntk_alibi(4)"])
def test_decoding_is_prefill(kind, text):
    """Beyond MPT's max_seq_len, too, where transformers stops."""
    model, ids = model_of(kind), tokens(40, batch=2)
    with under(model, text):
        for prompt in (1, 21):
            torch.testing.assert_close(
                decoded(model, ids, prompt), out(model, ids), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["alibi()", "alibi_interpolated(4)", "ntk_alibi(4)"])
def test_padded_is_unpadded(kind, text):
    model = model_of(kind)
    ids, mask = padded_pair(32, 20)
    with under(model, text):
        both = out(model, ids, attention_mask=mask)
        torch.testing.assert_close(both[:1], out(model, ids[:1]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both[1:, 12:], out(model, ids[1:, 12:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_generating_with_left_padding_is_generating_without(kind, options):
    if "falcon" in kind and "cache_implementation" in options:
        pytest.skip("transformers' own Falcon-RW can't use a static cache")
    model = model_of(kind)
    ids, mask = padded_pair(24, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    with under(model, "ntk_alibi(4)"):
        both = model.generate(ids, attention_mask=mask, **options)
        alone = model.generate(ids[1:, -9:], attention_mask=mask[1:, -9:], **options)
    assert torch.equal(both[1, -12:], alone[0, -12:])


def test_stock_mpt_ends_at_its_length_and_ours_does_not():
    model, ids = model_of("mpt"), tokens(SEQUENCE + 1)
    with pytest.raises(RuntimeError):
        out(model, ids)
    longer = tiny(
        "mpt", "AutoModelForCausalLM", max_seq_len=64, use_cache=True, num_attention_heads=4,
        hidden_size=32, d_model=32,
    )  # fmt: skip
    longer.load_state_dict(model.state_dict())
    with under(model, "alibi()"):
        assert torch.equal(out(model, ids), out(longer, ids))
        held = state(model)
    with pytest.raises(RuntimeError):
        out(model, ids)
    assert state(model) != held


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_gradients_flow_through_checkpointed_layers(kind):
    """Recomputing a layer makes the same bias again."""
    ids, grads = tokens(SEQUENCE, batch=2), []
    for again in (False, True):
        model = model_of(kind).train()
        if again:
            checkpointed(model)
        with under(model, "alibi_interpolated(4)"):
            model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(next(iter(model.parameters())).grad)
    torch.testing.assert_close(*grads)


def test_the_tiny_checkpoint_reads_on_with_interpolated_slopes():
    """Training-free, and so at a price: guessing among bytes is a loss of 5.5."""
    model = asset("tiny-alibi")
    far = tail_loss(model, 512)
    with under(model, "alibi()"):
        assert tail_loss(model, 512) == far < 2.5
    for text in ("alibi_interpolated(1.1)", "ntk_alibi(2)"):
        with under(model, text):
            assert tail_loss(model, 512) < far + 0.5
    with under(model, "alibi_interpolated(4)"):
        assert tail_loss(model, 512) < 5.5
