"""Multimodal models: three positions per token under any scheme, from the model's own code."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from longitude.core.validate import UserError
from longitude.hf.model_state import axes_of
from longitude.hf.patch import attention_patched, patched, probed_layers, scheme_of
from longitude.ops.axes import temporal_order
from tests.hf.tiny import END, IMAGE, MULTIMODAL, START, VIDEO, multimodal

GRID = torch.tensor([[1, 4, 8]])  # patches; two by two are merged: rows, columns and tokens
TOKENS = (2, 4, 8)
LEAKY, REROPE = "rope(remap=leaky_rerope(6, 4))", "rope(remap=rerope(5))"
YARN = "rope(frequencies=yarn(4, original=64)"
KINDS = list(MULTIMODAL)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


model = cache(multimodal)


def prompt(text: int = 12) -> dict[str, torch.Tensor]:
    """Words, an image of two rows and four columns of tokens, and words."""
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(3, 80, (1, 5 + text), generator=rng)
    image = torch.tensor([[START, *[IMAGE] * TOKENS[2], END]])
    ids = torch.cat([words[:, :5], image, words[:, 5:]], 1)
    pixels = torch.randn(int(GRID.prod()), 3 * 4 * 4, generator=rng)
    kinds = (ids == IMAGE).int()
    more = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": GRID, **more}


def by_steps(model: Any, given: dict[str, Any], bounds: tuple[int, ...]) -> torch.Tensor:
    """Logits of a prompt fed to a cache: the first piece holds the image, positions are its own."""
    places, _ = model.model.get_rope_index(
        given["input_ids"], given["mm_token_type_ids"], GRID, attention_mask=given["attention_mask"]
    )
    past, logits = None, []
    for a, b in pairwise(bounds):
        piece = {"input_ids": given["input_ids"][:, a:b], "position_ids": places[..., a:b]}
        if a == 0:
            piece |= {name: given[name] for name in ("pixel_values", "image_grid_thw")}
        out = model(**piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_scheme_gives_its_own_logits(kind: str) -> None:
    net, given = model(kind), prompt()
    stock, layers, own = net(**given).logits, probed_layers(net), scheme_of(net)
    with attention_patched(net, layers, [layer.scheme for layer in layers]):
        torch.testing.assert_close(net(**given).logits, stock, atol=1e-5, rtol=1e-5)
    with patched(net, own):
        assert torch.equal(net(**given).logits, stock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", [LEAKY, REROPE, f"{YARN}, remap=leaky_rerope(6, 4))"])
def test_decoding_equals_prefill_under_a_remap(kind: str, scheme: str) -> None:
    net, given = model(kind), prompt()
    stock = net(**given).logits
    n = stock.shape[1]
    with patched(net, scheme, check=False):
        full = net(**given, use_cache=False).logits
        for bounds in ((0, 16, 17, 18, n), (0, n)):
            torch.testing.assert_close(by_steps(net, given, bounds), full, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(full, stock, atol=1e-4)
    assert torch.equal(net(**given).logits, stock)


@pytest.mark.parametrize("kind", KINDS)
def test_generating_goes_on_after_the_image(kind: str) -> None:
    """The model's own rope_delta: a new token's position is not its index."""
    net, given = model(kind), prompt()
    n = given["input_ids"].shape[1]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    stock = net.generate(**given, **settings)
    layers = probed_layers(net)
    with attention_patched(net, layers, [layer.scheme for layer in layers]):
        assert torch.equal(net.generate(**given, **settings), stock)
    with patched(net, LEAKY):
        tokens = net.generate(**given, **settings)
        kinds = torch.cat([given["mm_token_type_ids"], torch.zeros(1, 6, dtype=torch.int)], 1)
        more = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(tokens)}
        full = net(**{**given, **more, "input_ids": tokens}).logits[:, n - 1 : -1]
    assert torch.equal(full.argmax(-1), tokens[:, n:])


FRAMES = torch.tensor([[3, 4, 4]])  # three frames of two by two tokens


def video(kind: str) -> dict[str, torch.Tensor]:
    """Words, a video of three frames, and words; Qwen3 has each frame by itself, after its time."""
    rng = torch.Generator().manual_seed(1)
    words, each = torch.randint(3, 80, (20,), generator=rng).tolist(), [VIDEO] * 4
    frames = [START, *each * 3, END]
    if "3" in kind:
        frames = [x for n in range(3) for x in (words[n], START, *each, END)]
    ids = torch.tensor([[*words[:5], *frames, *words[5:]]])
    kinds = 2 * (ids == VIDEO).int()
    pixels = torch.randn(int(FRAMES.prod()), 3 * 4 * 4, generator=rng)
    more = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, "pixel_values_videos": pixels, "video_grid_thw": FRAMES, **more}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "qwen" in kind])
def test_a_video_under_its_own_scheme_and_decoded_under_a_remap(kind: str) -> None:
    net, given = model(kind), video(kind)
    n = given["input_ids"].shape[1]
    stock, layers = net(**given).logits, probed_layers(net)
    with attention_patched(net, layers, [layer.scheme for layer in layers]):
        torch.testing.assert_close(net(**given).logits, stock, atol=1e-5, rtol=1e-5)
    places = net.model.get_rope_index(
        given["input_ids"], given["mm_token_type_ids"], video_grid_thw=FRAMES,
        attention_mask=given["attention_mask"],
    )[0]  # fmt: skip
    assert not torch.equal(places[0], places[1])
    with patched(net, LEAKY):
        full, past, logits = net(**given, use_cache=False).logits, None, []
        for a, b in pairwise((0, n - 6, n - 5, n - 4, n)):
            piece = {"input_ids": given["input_ids"][:, a:b], "position_ids": places[..., a:b]}
            if a == 0:
                piece |= {name: given[name] for name in ("pixel_values_videos", "video_grid_thw")}
            out = net(**piece, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, [*logits, out.logits]
        torch.testing.assert_close(torch.cat(logits, 1), full, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(full, stock, atol=1e-4)
    assert torch.equal(net(**given).logits, stock)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_left_padding_changes_nothing(kind: str) -> None:
    net, one, other = model(kind), prompt(8), prompt(12)
    both: dict[str, torch.Tensor] = {}
    for name in ("input_ids", "mm_token_type_ids", "attention_mask"):
        padded = torch.nn.functional.pad(one[name], (4, 0))
        both[name] = torch.cat([padded, other[name]])
    for name in ("pixel_values", "image_grid_thw"):
        both[name] = torch.cat([one[name], other[name]])
    with patched(net, LEAKY):
        logits = net(**both).logits
        torch.testing.assert_close(logits[:1, 4:], net(**one).logits, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(logits[1:], net(**other).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_yarn_alone_keeps_the_models_own_attention(kind: str) -> None:
    net, given = model(kind), prompt()
    stock, layers = net(**given).logits, probed_layers(net)
    with patched(net, f"{YARN})"):
        fast, schemes = net(**given).logits, [scheme_of(net).layer(0)] * len(layers)
    with attention_patched(net, layers, schemes):
        torch.testing.assert_close(net(**given).logits, fast, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(fast, stock, atol=1e-4)


def test_the_axes_are_the_papers() -> None:
    """d = 128 of Qwen2-VL and Qwen3-VL, and 64 of Qwen3.5."""
    from transformers import AutoConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    cases = [
        ("qwen2_vl_text", Qwen2VLRotaryEmbedding, [16, 24, 24], "t" * 16 + "h" * 24 + "w" * 24),
        ("qwen3_vl_text", Qwen3VLTextRotaryEmbedding, [24, 20, 20], "thw" * 20 + "tttt"),
        ("qwen3_5_text", Qwen3_5TextRotaryEmbedding, [11, 11, 10], "thw" * 10 + "th"),
    ]
    for kind, rotary, sections, axes in cases:
        size = 256 if kind == "qwen3_5_text" else 128
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        config = AutoConfig.for_model(kind, head_dim=size, hidden_size=4 * size,
                                      num_attention_heads=4, rope_parameters=rope)  # fmt: skip
        found = axes_of(rotary(config), len(axes))
        assert "".join("thw"[axis] for axis in found) == axes


def test_one_position_follows_time_and_the_order_of_tokens() -> None:
    """A 2 × 2 image after three words: t 3 3 3 3, then text at 5; u differs from t by a trace."""
    time = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 5, 6]])
    ids = time.expand(3, 1, -1).clone()
    ids[1, 0, 3:7], ids[2, 0, 3:7] = torch.tensor([[3, 3, 4, 4], [3, 4, 3, 4]])
    pos = temporal_order(ids, None, None)
    assert bool((pos.diff() > 0).all()) and float((pos - time).abs().max()) < 1e-5
    assert pos[0, 7] == 5 and pos[0, 8] == 6
    parts = [temporal_order(ids[..., :5], None, None)]
    parts.append(temporal_order(ids[..., 5:], None, parts[0][:, -1:]))
    assert torch.equal(torch.cat(parts, 1), pos)  # an image that two forwards share
    padded = torch.tensor([[True] * 3 + [False] * 6])
    assert bool((temporal_order(ids, padded, None)[:, 3:].diff() > 0).all())
    video = torch.tensor([[0, 1, 2, 2, 6, 6, 4, 5]])  # whose text may go on below its last frame
    assert bool((temporal_order(video.expand(3, 1, -1), None, None).diff() > 0).all())
    with pytest.raises(UserError, match="several documents"):
        temporal_order(torch.cat([ids, ids], -1), None, None)


@pytest.mark.parametrize(
    "scheme", ["rope() + window(8)", "rope(frequencies=dynamic_ntk(64))", "rope() + logn(64)"]
)
def test_what_goes_by_one_position_reads_text_only(scheme: str) -> None:
    net, given = model("qwen3_vl"), prompt()
    with patched(net, scheme, check=False):
        net(given["input_ids"].clamp(max=80))
        with pytest.raises(UserError, match="images have several positions per token"):
            net(**given)
