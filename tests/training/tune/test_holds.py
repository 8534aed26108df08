"""What fine-tuning is for, on the tiny checkpoints: minutes to an hour on a CPU, so on demand.

Losses are those of the last 128 bytes of test documents that the checkpoints were not trained on.
How many steps each takes: LOG.md, "How many steps the tiny checkpoints take" and "Linear
interpolation by 8".
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

from longitude.eval.documents import documents
from longitude.eval.prefill import greedy
from longitude.eval.tasks.passkey import passkey, retrieved
from longitude.extension.candidates import candidates
from longitude.hf.loading import load
from longitude.hf.patch import own_scheme, patched
from longitude.training.data import for_test, standard_library
from longitude.training.tune.run import TuneOptions, fine_tune

pytestmark = pytest.mark.slow
WINDOW, LAST, DOCS = 256, 128, 8


@torch.no_grad()
def tail(name: str, length: int, scheme: str | None = None) -> float:
    """The mean loss of the last bytes of documents of this length."""
    model, tokenizer = load(name, device="cpu", quiet=True)
    with patched(model, scheme) if scheme else nullcontext():
        losses = []
        for document in documents((), tokenizer, length, DOCS, 0, unseen=True):
            ids = document.first(length)[None]
            logits = model(ids[:, :-1], use_cache=False).logits[0, -LAST:]
            losses.append(cross_entropy(logits, ids[0, -LAST:]).item())
    return sum(losses) / len(losses)


def best_free(name: str, length: int) -> float:
    """The least loss that any method of `extend` has without training."""
    model, _ = load(name, device="cpu", quiet=True)
    found = candidates("auto", own_scheme(model), WINDOW, length)
    bare = [one.text for one in found if one.text or name != "tiny-learned"]
    return min(tail(name, length, text) for text in bare)


def tuned(tmp_path, name: str, to: str, **options) -> str:
    """The folder of a fine-tuned checkpoint."""
    given = {"lora": False, "batch": 8, "device": "cpu"} | options
    return fine_tune(name, to, TuneOptions(out=tmp_path / "run", **given)).folder


def test_linear_interpolation_by_8_comes_near_leaky_rerope(tmp_path):
    far = 8 * WINDOW
    free = tail("tiny-rope", far, "rope(remap=leaky_rerope(128, 32))")
    assert tail("tiny-rope", far, "rope(frequencies=linear(8))") > 3 * free
    steps = {"steps": 260, "batch": 4, "seq": far, "lr": 2e-3}
    folder = tuned(tmp_path, "tiny-rope", to="8x", recipe="pi", **steps)
    assert tail(folder, far) < 1.05 * free


@pytest.mark.parametrize(("name", "rate"), [("tiny-learned", 1e-3), ("tiny-alibi", 1e-4)])
def test_other_positions_improve_on_what_needs_no_training(tmp_path, name, rate):
    folder = tuned(tmp_path, name, to="4x", steps=100, batch=4, lr=rate)
    assert tail(folder, 4 * WINDOW) < best_free(name, 4 * WINDOW)


def test_pose_on_short_sequences_finds_passkeys_at_four_times_the_window(tmp_path):
    """As the checkpoint was trained: three parts text, one part passkeys of its window."""
    texts = tmp_path / "text"
    texts.mkdir()
    for n, document in enumerate(d for d in standard_library() if not for_test(d.name)):
        (texts / f"{n}.txt").write_bytes(document.text)
    size = sum(file.stat().st_size for file in texts.iterdir())
    for n in range(size // 3 // 4096):
        asked = [passkey(WINDOW - 2, rng=16 * n + i, form="short") for i in range(16)]
        (texts / f"key{n}.txt").write_text("\n\n".join(p.prompt + p.answer for p in asked))
    positions = {"steps": 240, "batch": 32, "seq": WINDOW, "lr": 1e-3}
    folder = tuned(tmp_path, "tiny-rope", to="4x", recipe="pose", text=(str(texts),), **positions)
    model, tokenizer = load(folder, device="cpu", quiet=True)
    found = []
    for seed in range(40):
        asked = passkey(4 * WINDOW, rng=10**6 + seed, form="short")
        prompt = torch.tensor(tokenizer(asked.prompt).input_ids)
        found.append(retrieved(asked, tokenizer.decode(greedy(model, prompt, 8))))
    assert sum(found) >= 0.9 * len(found)
