"""Scores by distance, against the attention that the models themselves report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude.core.validate import UserError
from longitude.inspection.qk_hooks import LayerQK, capture_qk
from longitude.inspection.rows import plain
from longitude.inspection.scores import ScoreHistogram, measure, score_statistics, scores

from ..hf.families.models import tiny, tokens
from ..hf.tiny import SLIDING, config_of, ids, sharp

ROTARY = ("llama", "gemma2", "qwen3", "gpt_neox", "gpt_oss", "olmo3", "glm", "smollm3", "mistral")
OTHERS = {
    "gpt2": ("AutoModelForCausalLM", {}),
    "bert": ("AutoModel", {}),
    "opt": ("AutoModelForCausalLM", {}),
    "bloom": ("AutoModelForCausalLM", {}),
    "mpt": ("AutoModelForCausalLM", {"max_seq_len": 64}),
    "falcon": ("AutoModelForCausalLM", {"alibi": True, "new_decoder_architecture": False}),
}


def eager(kind: str, **more: Any) -> Any:
    """A tiny decoder that can hand out its attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(kind, **more), attn_implementation="eager")
    return sharp(made)


def family(kind: str) -> Any:
    head, entries = OTHERS[kind]
    return tiny(kind, head, "eager", **entries)


def all_heard(model: Any, text: Tensor) -> list[LayerQK]:
    found: list[LayerQK] = []
    capture_qk(model, text, found.append)
    return found


def reported(model: Any, text: Tensor) -> list[Tensor]:
    """The attention (h i j) of each layer, as the model gives it."""
    with torch.no_grad():
        return [a[0] for a in model(input_ids=text[None], output_attentions=True).attentions]


def same_attention(model: Any, text: Tensor) -> None:
    theirs = reported(model, text)
    rows = torch.arange(1, len(text), 3)
    heard = all_heard(model, text)
    assert [h.layer for h in heard] == [*range(len(theirs))]
    for one, attention in zip(heard, theirs, strict=True):
        made, seen, attended = scores(one, rows)
        torch.testing.assert_close(attended, attention[:, rows], atol=2e-5, rtol=1e-3)
        log = (made - made.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)).exp()
        if one.sinks is None:
            torch.testing.assert_close(log * seen, attention[:, rows], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ROTARY)
def test_scores_are_what_a_rotary_model_attends_by(kind: str) -> None:
    same_attention(eager(kind), ids(40)[0])


@pytest.mark.parametrize("kind", OTHERS)
def test_scores_are_what_other_models_attend_by(kind: str) -> None:
    same_attention(family(kind), tokens(14)[0])


def test_listening_leaves_a_model_as_it_was() -> None:
    model, text = eager("llama"), ids(40)[0]
    with torch.no_grad():
        before = model(input_ids=text[None]).logits
        capture_qk(model, text, lambda heard: None)
        assert torch.equal(before, model(input_ids=text[None]).logits)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "cohere", "glm"])
def test_queries_are_turned_back(kind: str) -> None:
    """Undone, the same token has the same query and key at every place of the first layer."""
    model = eager(kind)
    first = all_heard(model, torch.full((20,), 7))[0]
    found = first.pre_rope()
    assert found is not None
    for rotated, unrotated in zip((first.q, first.k), found, strict=True):
        assert not torch.allclose(rotated[:, :, :1], rotated, atol=1e-3)
        first_token = unrotated[:, :, :1].expand_as(unrotated)
        torch.testing.assert_close(first_token, unrotated, atol=1e-4, rtol=1e-4)


def test_bands_sinks_and_distances_are_sums_over_pairs() -> None:
    model, text = eager("llama"), ids(90)[0]  # its window is 64
    found = score_statistics(model, text, queries=1000)
    assert (found.trained, found.length, found.scheme) == (64, 90, "rope()")
    first = max(1, 90 // 16)
    rows, keys = torch.arange(first, 90), torch.arange(90)
    assert found.queries == len(rows)
    away = rows[:, None] - keys
    for layer, qk in zip(found.layers, all_heard(model, text), strict=True):
        group = qk.q.shape[1] // qk.k.shape[1]
        full = qk.q[0] @ qk.k[0].repeat_interleave(group, 0).mT * qk.scale
        full = full[:, rows].double()
        attended = full.masked_fill(away < 0, -torch.inf).softmax(-1)
        for h, head in enumerate(layer.heads):
            for band, here in ((head.inside, (away >= 0) & (away < 64)), (head.past, away >= 64)):
                assert band is not None
                s = full[h][here]
                assert band.count == len(s)
                assert (band.least, band.greatest) == pytest.approx(
                    (float(s.min()), float(s.max()))
                )
                told = (band.mean, band.std)
                assert told == pytest.approx(
                    (float(s.mean()), float(s.std(correction=0))), rel=1e-4
                )
                mass = float(attended[h][here].sum()) / len(rows)
                assert band.mass == pytest.approx(mass, abs=1e-5)
            assert head.sink == pytest.approx(float(attended[h][:, 0].mean()), abs=1e-5)
            assert head.away == pytest.approx(float((attended[h] * away).sum(-1).mean()), rel=1e-3)
            assert sum(b.scores.count for b in head.bins) == head.inside.count + head.past.count  # type: ignore[union-attr]


def test_moved_pairs_are_the_rotation_at_other_distances() -> None:
    model, text = eager("llama"), ids(80)[0]
    found = score_statistics(model, text).layers[0].heads[1].moved
    assert found is not None
    plain = all_heard(model, text)[0].pre_rope()
    assert plain is not None
    q, k = plain[0][0, 1].double(), plain[1][0, 0].double()  # two heads share a key's
    rng = torch.Generator().manual_seed(0)
    i, j = torch.randint(80, (2, 64), generator=rng)
    ends = []
    for r in (torch.arange(64).double(), torch.arange(64, 128).double()):
        score = torch.zeros(64, 64, dtype=torch.float64)
        for t in range(8):
            angle = r * 10000 ** (-2 * t / 16)
            x, y = q[i, t, None], q[i, t + 8, None]
            u, v = k[j, t, None], k[j, t + 8, None]
            score += (x * angle.cos() - y * angle.sin()) * u
            score += (x * angle.sin() + y * angle.cos()) * v
        ends.append(float(score.abs().max()) / math.sqrt(16))
    assert (found.inside, found.past) == pytest.approx(tuple(ends), rel=1e-3)
    assert found.ceiling >= max(ends)


def test_a_head_that_goes_by_distance_alone_is_told_from_one_that_never_does() -> None:
    n, rng = 128, torch.Generator().manual_seed(0)
    rows = torch.arange(8, n)
    seen = torch.arange(n) <= rows[:, None]
    near = -0.1 * (rows[:, None] - torch.arange(n)).double()
    noise = torch.randn(len(rows), n, generator=rng, dtype=torch.float64)
    level = 50 * torch.randn(len(rows), 1, generator=rng, dtype=torch.float64)  # softmax is blind
    made = torch.stack([near + level, noise + level, near + noise + level])
    attended = made.masked_fill(~seen, -torch.inf).softmax(-1)
    histogram = ScoreHistogram(3, n, 100)
    for part in torch.arange(len(rows)).split(50):
        histogram.add(rows[part], made[:, part], seen[part], attended[:, part])
    shares = [histogram.explained_variance(h, n) for h in range(3)]
    assert shares[0] > 0.7 and shares[1] < 0.01
    assert shares[1] < shares[2] < shares[0]


def test_windows_hide_what_is_past_them() -> None:
    found = score_statistics(eager("mistral", **SLIDING), ids(90)[0])
    for layer in found.layers:
        assert layer.written.endswith("window(12)")
        assert all(
            h.past is None and h.inside.mass == pytest.approx(1, abs=1e-5) for h in layer.heads
        )


def test_a_checkpoint_is_measured_on_text(tmp_path: Path) -> None:
    found = measure("tiny-rope", length=300, queries=16)
    assert (found.trained, found.length, len(found.layers), found.terms) == (256, 300, 5, None)
    assert found.notes == () and all(h.past for row in found.layers for h in row.heads)
    # a trained model looks near: its mean score falls, and most heads go by distance
    uses = [h.uses_position for row in found.layers for h in row.heads]
    assert sum(uses) > len(uses) / 2
    text = tmp_path / "text.txt"
    text.write_text("a text of a few words " * 40, encoding="utf-8")
    short = measure("tiny-learned", text=(str(text),), queries=16)
    assert short.length == 256 and short.terms is not None and "ends there" in short.notes[0]
    data = plain(short)
    assert data["terms"]["heads"][0]["terms"][0]["name"] == "content–content"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 300}, "16 to 256"),
        ({"length": 3}, "16 to 256"),
        ({"text": ("nowhere.txt",)}, "there is no file or folder"),
    ],
)
def test_what_can_not_be_read_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure("tiny-learned", **options)


def test_no_more_scores_than_a_block_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from longitude.inspection import scores as module

    model, text = eager("llama"), ids(80)[0]
    whole, made = score_statistics(model, text), []

    def watched(qk: LayerQK, rows: Tensor) -> Any:
        made.append(qk.q.shape[1] * len(rows) * qk.k.shape[2])
        return scores(qk, rows)

    monkeypatch.setattr(module, "scores", watched)
    monkeypatch.setattr(module, "BLOCK", 1000)
    parts = score_statistics(model, text)
    assert max(made) <= 1000 and len(made) > 4 * len(whole.layers)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        for mine, theirs in zip(a.heads, b.heads, strict=True):
            assert mine.inside.count == theirs.inside.count
            assert mine.inside.mean == pytest.approx(theirs.inside.mean)
            assert (mine.position, mine.sink) == pytest.approx((theirs.position, theirs.sink))


def test_encoders_look_both_ways() -> None:
    found = score_statistics(family("bert"), tokens(14)[0], queries=100)
    for head in (h for row in found.layers for h in row.heads):
        # 13 queries see 14 keys each: themselves, and 0 to 13 tokens away on either side
        assert head.inside.count == 13 * 14 and head.bins[0].scores.count == 13
        assert head.inside.mass == pytest.approx(1, abs=1e-5)


def test_a_patch_is_taken_off_to_measure(tmp_path: Path) -> None:
    from longitude.hf.patch import apply, undo

    model, text = eager("llama"), ids(80)[0]
    plain = score_statistics(model, text)
    apply(model, "rope(remap=rerope(16))")
    found = score_statistics(model, text)
    undo(model)
    assert found.layers == plain.layers and found.scheme == "rope()"
    assert found.notes == ("Measured without rope(remap=rerope(16)), which was applied to it.",)


def test_folders_are_read_but_for_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words " * 60, encoding="utf-8")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe" * 50)
    found = measure("tiny-rope", text=(str(tmp_path),), length=300, queries=4)
    assert found.length == 300 and found.text == str(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_models_without_a_known_way_are_refused(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    small: dict[str, dict[str, Any]] = {
        "t5": {"d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2},
        "bart": {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16},
    }
    config = AutoConfig.for_model(kind, vocab_size=20, d_model=16, **small[kind])
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UserError, match="one half"):
        capture_qk(model, torch.arange(5), lambda heard: None)
