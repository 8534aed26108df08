"""Vision towers with axial RoPE: their own features, other frequencies, undone to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude import UserError, parse
from longitude.hf.encodings import encodings
from longitude.hf.families.axial import attention_patched

ROPE = {"rope_type": "axial", "rope_theta": 100.0}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1, "in_channels": 3,
        "spatial_merge_size": 2, "rope_parameters": ROPE}  # fmt: skip
SHARP = ("qkv", "q_proj", "k_proj", "vision_adapter")
GRIDS = torch.tensor([[1, 4, 8], [2, 4, 4]])  # an image, and two frames of a video


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def sharp(model: Any) -> Any:
    """A model whose attention is far from uniform, so that positions show."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and any(part in name for part in SHARP):
            weight.mul_(12)
    return model.eval()


@cache
def tower(kind: str) -> tuple[Any, dict[str, Any]]:
    """A small random vision tower, and an input of two images."""
    import transformers as t
    from transformers.models.qwen2_vl import modeling_qwen2_vl as two
    from transformers.models.qwen3_vl import modeling_qwen3_vl as three

    torch.manual_seed(0)
    if kind == "pixtral":
        config = t.PixtralVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=64, patch_size=4, rope_parameters=ROPE,
        )  # fmt: skip
        sizes = [(16, 24), (8, 32)]
        given = {"pixel_values": torch.randn(2, 3, 16, 32), "image_sizes": sizes}
        return sharp(t.PixtralVisionModel(config)), given
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "patch_size": 4}  # fmt: skip
    if kind == "dinov3":
        config = t.DINOv3ViTConfig(**sizes, image_size=16, num_register_tokens=2, rope_theta=100.0)
        return sharp(t.DINOv3ViTModel(config)), {"pixel_values": torch.randn(2, 3, 16, 24)}
    if kind == "llama4":
        config = t.Llama4VisionConfig(
            **sizes | {"intermediate_size": 128}, image_size=16, vision_output_dim=32,
            projector_input_dim=32, projector_output_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        )  # fmt: skip
        return sharp(t.Llama4VisionModel(config)), {"pixel_values": torch.randn(2, 3, 16, 16)}
    patches = torch.randn(int(GRIDS.prod(1).sum()), 3 * 4 * 4)
    given = {"hidden_states": patches, "grid_thw": GRIDS}
    if kind == "qwen2_vl":
        config = t.AutoConfig.for_model(
            "qwen2_vl", vision_config={**QWEN, "embed_dim": 32, "hidden_size": 32}
        )
        return sharp(two.Qwen2VisionTransformerPretrainedModel(config.vision_config)), given
    config = t.AutoConfig.for_model("qwen3_vl", vision_config={
        **QWEN, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32,
        "deepstack_visual_indexes": [0]})  # fmt: skip
    return sharp(three.Qwen3VLVisionModel(config.vision_config)), given


KINDS = {
    "qwen2_vl": "rope(base=100, axes=axial()) + bidirectional()",
    "qwen3_vl": "rope(base=100, axes=axial()) + bidirectional()",
    "pixtral": "rope(base=100, axes=axial(spectrum='alternating')) + bidirectional()",
    "dinov3": "rope(base=100, axes=axial()) + bidirectional()",
    "llama4": "rope(base=100, pairs='adjacent', axes=axial()) + bidirectional()",
}


def features(kind: str) -> torch.Tensor:
    model, given = tower(kind)
    return model(**given).last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_scheme_gives_its_own_features(kind):
    model, _ = tower(kind)
    stock, own = features(kind), lh.scheme_of(model)
    assert own == parse(KINDS[kind])
    with attention_patched(model, parse(KINDS[kind]).layer(0)):  # our attention
        torch.testing.assert_close(features(kind), stock, atol=1e-4, rtol=1e-4)
    with lh.patched(model, own):
        assert torch.equal(features(kind), stock)
    assert torch.equal(features(kind), stock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["rope(frequencies=linear(2))", "rope(frequencies=ntk(2))"])
def test_a_larger_image_by_other_frequencies(kind, scheme):
    model, _ = tower(kind)
    stock = features(kind)
    with lh.patched(model, scheme):
        fast, full = features(kind), lh.scheme_of(model).layer(0)
    assert torch.equal(features(kind), stock) and not torch.allclose(fast, stock, atol=1e-3)
    with attention_patched(model, full):
        torch.testing.assert_close(features(kind), fast, atol=1e-4, rtol=1e-4)
    assert torch.equal(features(kind), stock)


@pytest.mark.parametrize("kind", KINDS)
def test_inspecting_its_configuration_says_the_same(kind):
    (found, *_) = encodings(tower(kind)[0].config)
    assert found.scheme == KINDS[kind]


def test_a_scale_runs_by_our_attention_and_a_remap_is_refused():
    model, _ = tower("qwen2_vl")
    stock = features("qwen2_vl")
    with lh.patched(model, "temperature(2)"):
        assert not torch.allclose(features("qwen2_vl"), stock, atol=1e-3)
    assert torch.equal(features("qwen2_vl"), stock)
    with (
        pytest.raises(UserError, match="no order of tokens"),
        lh.patched(model, "rope(remap=rerope(4))"),
    ):
        pass
    with (
        pytest.raises(UserError, match="trained with rope"),
        lh.patched(model, "rope(axes=axial('alternating'))"),
    ):
        pass
