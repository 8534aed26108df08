"""The probe sees a rotation through the rounding of half precision."""

from __future__ import annotations

import copy

import pytest
import torch

from longitude.hf.patch import probed_layers
from tests.hf.tiny import shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi", "gpt_neox", "cohere", "glm4"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_model_in_half_precision_has_the_scheme_it_has_in_full(kind, dtype):
    model = shared(kind)
    want = [(one.scheme, one.rotary_start, one.rotary_dim) for one in probed_layers(model)]
    found = probed_layers(copy.deepcopy(model).to(dtype))
    assert [one.unsupported_reason for one in found] == [None] * len(found)
    assert [(one.scheme, one.rotary_start, one.rotary_dim) for one in found] == want
