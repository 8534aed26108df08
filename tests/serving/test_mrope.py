"""Texts through models of M-RoPE: a token's three positions coincide, and schemes go by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torchvision")  # without it vLLM can't import these models

from longitude.core.validate import UserError
from tests.hf.tiny import END, IMAGE, MULTIMODAL, START
from tests.serving.engines import check, engine, generate, saved, small_model, tokens
from tests.serving.test_refusals import engine_config

REROPE, LEAKY = "rope(remap=rerope(32))", "rope(remap=leaky_rerope(32, 8))"
YARN = "rope(frequencies=yarn(4, original=64), remap=rerope(32)) + logn(64)"
CASES = [  # sections in a row; interleaved; a quarter of each head, and no sections in vLLM
    *(("qwen2_vl", scheme) for scheme in (REROPE, LEAKY, YARN)),
    ("qwen3_vl", REROPE),
    ("qwen3_vl", YARN),
    ("qwen3_5_text", LEAKY),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def text_alone(kind: str) -> dict[str, Any]:
    return {"language_model_only": True} if kind in MULTIMODAL else {}


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_a_text_equals_patched(kind: str, scheme: str, folders: Path) -> None:
    window = small_model(kind).config.get_text_config().max_position_embeddings
    options = {"max_num_batched_tokens": window, **text_alone(kind)}
    with engine(saved(kind, folders / kind), scheme, "3x", **options) as llm:
        check(kind, scheme, generate(llm, [tokens(n, n) for n in (window // 2, 3, window + 5)]))
        long = tokens(window * 5 // 2)
        outputs = generate(llm, [long])
        check(kind, scheme, outputs)
        with pytest.raises(AssertionError):
            check(kind, None, outputs)
        again = generate(llm, [long + tokens(10, 7)])
        assert again[0].num_cached_tokens >= window
        check(kind, scheme, again)


def test_without_a_scheme_it_is_stock(folders: Path) -> None:
    folder = saved("qwen2_vl", folders / "qwen2_vl")
    with engine(folder, block_size=32, language_model_only=True) as llm:
        check("qwen2_vl", None, generate(llm, [tokens(n, n) for n in (32, 3, 50)]))


def test_images_are_refused(folders: Path) -> None:
    from PIL import Image

    folder, entry = saved("qwen2_vl", folders / "qwen2_vl"), {"scheme": REROPE, "to": 192}
    said = r"can't serve rope\(remap=rerope\(32\)\) with images or audio \(--language-model-only"
    with pytest.raises(UserError, match=said):
        engine_config(folder, entry)
    with engine(folder, REROPE, "3x", language_model_only=True) as llm:
        image = {"image": Image.new("RGB", (16, 16))}
        prompt = {"prompt_token_ids": [5, START, IMAGE, END, 7], "multi_modal_data": image}
        with pytest.raises(ValueError, match="not available for text-only models"):
            llm.generate([prompt], use_tqdm=False)
