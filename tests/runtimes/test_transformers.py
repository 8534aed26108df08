"""What transformers computes, asked of transformers itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.runtimes.configs import (
    DYNAMIC,
    LINEAR,
    LLAMA3,
    LONGROPE,
    ORIGINAL,
    SIZES,
    YARN,
    both,
    emulate,
    five,
    four,
)
from tests.runtimes.peers import close

CASES: dict[str, dict[str, Any]] = {
    "plain": five({"rope_type": "default", "rope_theta": 5e5}),
    "of the class": {**SIZES, "max_position_embeddings": 2048},
    "another class": {**SIZES, "model_type": "smollm3", "max_position_embeddings": 2048},
    "linear": both(LINEAR),
    "dynamic": five(DYNAMIC, 8192),
    "llama3": four(LLAMA3),
    "yarn": both(YARN),
    "yarn in 4": four(YARN),
    "yarn, its factor": five({**YARN, "attention_factor": 1.3}),
    "yarn, mscales": five({**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}),
    "yarn, one mscale": five({**YARN, "mscale": 0.7}),
    "yarn, betas": five({**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    "yarn without original": five({k: v for k, v in YARN.items() if k != ORIGINAL}),
    "theta lost": five({k: v for k, v in YARN.items() if k != "rope_theta"}),
    "theta lost to rope_scaling": {
        **five({"rope_type": "default", "rope_theta": 5e5}),
        "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
    },
    "type against rope_type": five({**YARN, "type": "linear"}),
    "longrope": both(LONGROPE),
    "longrope by lengths": five({k: v for k, v in LONGROPE.items() if k != "factor"}),
    "longrope, its factor": five({**LONGROPE, "attention_factor": 1.25}),
    "original beside": five({**YARN, ORIGINAL: 4096}, **{ORIGINAL: 8192}),
    "share": {**five({**LINEAR, "partial_rotary_factor": 0.5}), "model_type": "stablelm"},
    "share beside": {**four(YARN), "model_type": "stablelm", "partial_rotary_factor": 0.25},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_as_transformers_itself(name: str) -> None:
    found = emulate("transformers", CASES[name])
    config: Any = AutoConfig.for_model(**deepcopy(CASES[name]))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, gain = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, gain = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=found.length)
    close(found.inv_freq, theirs.tolist())
    assert found.attention == pytest.approx(gain, rel=1e-9)
    assert found.length >= config.max_position_embeddings


def test_overrides_without_theta_do_not_start() -> None:
    own = {k: v for k, v in YARN.items() if k != "rope_theta"}
    found = emulate("transformers", {**five(YARN), "from_pretrained": {"rope_scaling": own}})
    assert not found.starts and found.issues == ("no theta",)
    config: Any = AutoConfig.for_model(**deepcopy(five(YARN)))
    config.rope_parameters = dict(own)
    config.standardize_rope_params()
    with pytest.raises(TypeError):
        LlamaRotaryEmbedding(config)


def test_a_theta_beside_the_dictionary_is_not_read() -> None:
    told = {**five(YARN), "from_pretrained": {"rope_theta": 9e9}}
    found = emulate("transformers", told)
    assert found.inv_freq == emulate("transformers", five(YARN)).inv_freq
    assert found.issues == ("theta beside",)
