"""What llama.cpp computes, asked of llama.cpp itself: the model under its frequencies, as given
here, has its log-probabilities. Needs xllamacpp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude.hf.gguf_reader import read_header
from longitude.runtimes import llama_cpp
from tests.hf.gguf_files import write_gguf
from tests.runtimes.configs import emulate

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH = 200
PROGRAM = Path(llama_cpp.__file__).with_name("llama_cpp_process.py")
YARN: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0} | {
    "rope.scaling.original_context_length": 64
}
RISING = [1.0 + i for i in range(16)]
LISTS = {"rope_factors_long.weight": RISING, "rope_factors_short.weight": [1.0] * 16}
LONGROPE = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "yarn": (YARN, {}),
    "yarn, attn_factor": ({**YARN, "rope.scaling.attn_factor": 1.5}, {}),
    "yarn, dead key": ({**YARN, "rope.scaling.yarn_attn_factor": 1.5}, {}),
    "yarn, dead betas": ({**YARN, "rope.scaling.yarn_beta_fast": 4.0}, {}),
    "yarn without original": ({k: v for k, v in YARN.items() if "original" not in k}, {}),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "a factor without a type": ({"rope.scaling.factor": 4.0}, {}),
    "a factor of type none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "legacy": ({"rope.scale_linear": 2.0}, {}),
    "divisors": ({"rope.scaling.attn_factor": 1.3}, {"rope_freqs.weight": RISING}),
    "divisors and yarn": (YARN, {"rope_freqs.weight": RISING}),
    "plain, dead key": ({"rope.scaling.yarn_attn_factor": 1.5}, {}),
    "lists, long": ({**LONGROPE, "rope.scaling.original_context_length": 64}, LISTS),
    "lists, short": ({**LONGROPE, "rope.scaling.original_context_length": 256}, LISTS),
    "lists with a factor": (
        {**LONGROPE, "rope.scaling.original_context_length": 64, "rope.scaling.factor": 2.0},
        LISTS,
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=300,
        max_position_embeddings=256,
        head_dim=32,
        initializer_range=0.35,  # attention that looks somewhere, so that positions matter
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_as_llama_cpp_itself(name: str, model: Any, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    keys, extra = CASES[name]
    file = write_gguf(tmp_path / "m.gguf", model, keys, extra, vocabulary=True)
    header = read_header(file)
    held = {**header.keys, **header.divisors}
    ids = torch.randint(3, 259, (LENGTH,), generator=torch.Generator().manual_seed(1))
    theirs = dict(_asked(file, ids.tolist()))
    ours = _log_probabilities(model, ids, emulate("llama.cpp", {**held, "-c": LENGTH + 8}))
    assert max(abs(ours[t] - said) for t, said in theirs.items()) < 0.02
    if "dead" in name:  # were the keys heeded, it would show
        other = _log_probabilities(model, ids, llama_cpp.from_keys(held, literal=True))
        assert max(abs(other[t] - said) for t, said in theirs.items()) > 0.05


def test_a_tensor_that_is_not_asked_for_stops_it(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    file = write_gguf(tmp_path / "m.gguf", model, {}, LISTS, vocabulary=True)
    with pytest.raises(subprocess.CalledProcessError):
        _asked(file, [3, 4, 5] * 70)
    header = read_header(file)
    assert not emulate("llama.cpp", {**header.keys, **header.divisors}).starts


def _asked(file: Path, ids: list[int]) -> list[tuple[int, float]]:
    asked = {"path": str(file), "ids": ids, "lengths": [LENGTH], "top": 20, "drawn": 64}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps({**asked, "threads": 1}),
        capture_output=True,
        text=True,
        check=True,
    )
    return [(token, said) for token, said in json.loads(ran.stdout.splitlines()[-1])[0]]


def _log_probabilities(model: Any, ids: torch.Tensor, found: Any) -> list[float]:
    rotary = model.model.rotary_emb
    kept = rotary.inv_freq, rotary.attention_scaling
    rotary.inv_freq = torch.tensor(found.inv_freq, dtype=torch.float32)
    rotary.attention_scaling = found.attention
    try:
        with torch.no_grad():
            return model(ids[None]).logits[0, -1].log_softmax(-1).tolist()
    finally:
        rotary.inv_freq, rotary.attention_scaling = kept
