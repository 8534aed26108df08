"""The card says what was changed, carries over what must be, and shows what was measured."""

import shutil
from pathlib import Path

import pytest
import yaml

from longitude.core.validate import UserError
from longitude.hf.source import ASSETS
from longitude.runtimes import runtimes
from longitude.runtimes.checkpoint import open_checkpoint
from longitude.runtimes.export import ExportResult, PriorRun, exports
from longitude.runtimes.files import card, front_matter
from tests.runtimes.configs import request

TEXT = "rope(frequencies=yarn(4, original=256))"


def told(label: str, mean: float, what: str = "best") -> dict[str, object]:
    numbers = {"own": "as it is", "measure": "context", "length": 1024, "target": 1024}
    value = {"mean": mean, "low": mean, "high": mean, "n": 4}
    sentence = f"{what}: {label} has {mean}."
    numbers |= {"value": value}
    scheme = f"rope(frequencies={label})" if "yarn" in label else "rope()"
    return {"label": label, "scheme": scheme, "sentence": sentence, "numbers": numbers}


def advice(label: str = "yarn(4, original=256)") -> PriorRun:
    runtimes = {r: told(label, 1.5, r) for r in ("transformers", "vllm", "sglang", "llama.cpp")}
    best = told("rerope(128)", 1.25)
    summary = "## tiny-rope at 1,024 tokens\n\n| method | loss |\n\n![chart](charts/a.png)\n"
    return PriorRun("tiny-rope", 1024, best, runtimes, summary)


def header(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---\n")[1])


def test_what_the_base_models_card_says_is_carried_over(tmp_path: Path) -> None:
    home = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny-rope", home)
    (home / "README.md").write_text(
        "---\nlicense: mit\nbase_model: some/base\nlanguage: [en]\ntags: [code]\n"
        "widget: [{text: a}]\n---\n# Its own text\n---\n"
    )
    place = open_checkpoint(str(home))
    done = exports(place, [request("vllm", TEXT)], 1024)
    text = card(ExportResult(place, tuple(done), 1024))
    assert header(text) == {
        "license": "mit",
        "base_model": "some/base",
        "language": ["en"],
        "tags": ["code", "long-context", "longitude"],
    }
    assert "Its own text" not in text
    assert "reads 1,024 tokens; it was trained on texts of 256" in text
    assert "Peng et al. 2023, arXiv:2309.00071" in text
    assert "vllm serve" in text
    assert "Nothing was measured" in text


def test_headers_that_can_not_be_read(tmp_path: Path) -> None:
    assert front_matter(tmp_path / "none") == {}
    for text in ("no header", "---\nlicense: mit\n", "---\n- a\n---\n", "---\na: [\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert front_matter(tmp_path / "README.md") == {}


def test_numbers_of_a_run_stand_in_it() -> None:
    place = open_checkpoint("tiny-rope")
    done = exports(place, [request("transformers", TEXT), request("ollama", TEXT)], 1024)
    text = card(ExportResult(place, tuple(done), 1024, advice()))
    assert "## Measured\n\n### tiny-rope at 1,024 tokens" in text
    assert "| method | loss |" in text
    assert "charts/a.png" not in text
    assert "**Ollama**: Ollama serves a GGUF file" in text


def test_what_a_run_advises_and_what_it_costs() -> None:
    one, known = advice(), runtimes()
    assert one.scheme(known["ollama"]) == one.scheme(known["mlx"]) == TEXT
    cost = "against rerope(128), the best of all, its loss at 1,024 tokens is +0.250"
    assert one.cost(known["sglang"]) == cost
    assert one.cost(known["vllm"]) is None and one.scheme(known["vllm"]) == one.best["scheme"]
    with pytest.raises(UserError, match=r"advises no scheme for sglang: sglang: as it is has 1\.5"):
        advice("as it is").scheme(known["sglang"])
