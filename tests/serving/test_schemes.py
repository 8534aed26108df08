"""The schemes of each layer, from a configuration alone: equal to those of the model itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from longitude import attention, parse
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.patch import patched, scheme_of
from longitude.serving.schemes import layer_schemes, on_heads, own_schemes
from longitude.serving.settings import requested
from tests.hf.tiny import config_of, shared

KINDS = ("llama", "gemma3_text", "glm4", "cohere2", "stablelm", "mistral", "smollm3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_says_what_the_model_does(kind: str) -> None:
    text, model = "rope(remap=rerope(8))", shared(kind)
    own, wanted = own_schemes(config_of(kind)), layer_schemes(config_of(kind), text)
    assert own == {n: scheme_of(model).layer(n, 4) for n in range(4)}
    with patched(model, text):
        assert wanted == {n: scheme_of(model).layer(n, 4) for n in range(4)}


def test_layers_without_attention_are_left_out() -> None:
    assert list(own_schemes(config_of("qwen3_next"))) == [3]


@pytest.mark.parametrize(("kind", "why"), [("bert", "learned vector"), ("t5", "bucket")])
def test_other_encodings_are_refused(kind: str, why: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(UserError, match=why):
        layer_schemes(AutoConfig.for_model(kind), "rope(remap=rerope(8))")


@pytest.mark.parametrize(
    "text", ["alibi()", "alibi_interpolated(4)", "ntk_alibi(4)", "sandwich(8)"]
)
def test_some_heads_of_a_bias(text: str) -> None:
    q, k, v = torch.randn(3, 1, 6, 20, 8, dtype=torch.float64)
    scheme, at = parse(text), range(20)
    assert isinstance(scheme, Scheme)
    whole = attention(scheme, q, k, v, at, at)
    for first in (0, 2, 4):
        some = slice(first, first + 2)
        part = attention(on_heads(scheme, first, 2, 6), q[:, some], k[:, some], v[:, some], at, at)
        torch.testing.assert_close(part, whole[:, some])
    assert on_heads(scheme, 0, 6, 6) is scheme
    falcon = attention(on_heads(scheme, 0, 6, 6, 0.5), q, k, v, at, at)
    assert not torch.allclose(falcon, whole)


def test_a_checkpoint_that_was_saved_under_a_scheme_names_it(tmp_path) -> None:
    args = SimpleNamespace(additional_config=None, model=str(tmp_path))
    assert requested(args) is None
    saved = {"scheme": "drope(256)", "target": 1024, "version": "0.1.0"}
    (tmp_path / "config.json").write_text(json.dumps({"longitude": saved}))
    assert requested(args) == {"scheme": "drope(256)", "to": 1024, "force": None}
    expressed = saved | {"rope_parameters": {"rope_type": "default"}}  # vLLM reads the new ones
    (tmp_path / "config.json").write_text(json.dumps({"longitude": expressed}))
    assert requested(args) is None
    (tmp_path / "longitude.json").write_text(json.dumps({"scheme": "nope()", "to": 512}))
    assert requested(args) == {"scheme": "nope()", "to": 512}
