"""The lab: rows are what they say, the same again, and never computed twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.perplexity import by_position, edges, tail, token_losses
from longitude.training.data import excerpts
from longitude.training.distributed import generator
from longitude.training.lab import compare as module
from longitude.training.lab.compare import (
    LabOptions,
    Plan,
    compare,
    evaluate,
    label,
    make_plan,
    slug,
)
from longitude.training.lab.model import Decoder, DecoderConfig, trainable_schemes
from longitude.training.lab.tasks import task
from tests.training.conftest import CPU, small


def of(corpus, out, *schemes: str, lengths=(32, 64, 128)) -> Plan:
    tasks = ("text", "copy")
    shares = tuple((name, 1.0) for name in tasks)
    runs = tuple(small(corpus, s, steps=2, tasks=shares) for s in schemes)
    return Plan(runs, tasks, lengths, LabOptions(excerpts=3, problems=4, out=out))


def test_rows_are_computed_once(corpus, tmp_path, monkeypatch):
    plan = of(corpus, tmp_path, "rope()", "learned(32)")
    with Store(tmp_path / "rows.sqlite") as store:
        first = compare(plan, corpus, store, CPU)
        assert len(first) == 2 * 2 * 3
        monkeypatch.setattr(module, "train_run", None)  # would raise if it were called
        monkeypatch.setattr(module, "load", None)
        assert compare(plan, corpus, store, CPU) == first
    refused = {(s.label, s.length) for s in first if s.refused}
    assert refused == {("learned(32)", 64), ("learned(32)", 128)}
    assert all("outside the table of 32" in s.refused for s in first if s.refused)


def test_a_run_that_diverged_leaves_the_others_their_rows(corpus, tmp_path):
    plan = of(corpus, tmp_path, "rope()", "alibi()")
    mad, good = plan.runs
    plan = replace(plan, runs=(replace(mad, steps=2, rate=1e30), good))
    with Store(tmp_path / "rows.sqlite") as store:
        rows = [row for row in compare(plan, corpus, store, CPU) if row.task == "text"]
    assert {row.label for row in rows if row.refused} == {"rope()"}
    assert all("its loss is not finite" in row.refused for row in rows if row.refused)


@pytest.mark.parametrize("rate", [0.0, float("nan"), float("inf")])
def test_a_rate_is_a_finite_number(rate, corpus):
    with pytest.raises(UserError, match="rate must be finite and above zero, but got"):
        replace(small(corpus, "rope()"), rate=rate)


def test_gates_polar_pairs_and_drawn_positions_are_trained_and_read_on(corpus, tmp_path):
    """As `--schemes all` has them."""
    names = ("forget(", "polar", "e2_llm(", "cream(", "random_float(", "random_steps(")
    schemes = [s for s in trainable_schemes(32, 2) if any(name in s for name in names)]
    assert len(schemes) == len(names) + 1  # forget() and a learned slope
    with Store(tmp_path / "rows.sqlite") as store:
        rows = compare(of(corpus, tmp_path, *schemes), corpus, store, CPU)
    assert len(rows) == len(schemes) * 2 * 3 and not [row for row in rows if row.refused]
    losses = [row.value for row in rows if row.task == "text"]
    assert all(loss is not None and 0 < loss < 8 for loss in losses)


def test_a_missing_row_is_computed_from_the_model_that_is_there(corpus, tmp_path, monkeypatch):
    with Store(tmp_path / "rows.sqlite") as store:
        compare(of(corpus, tmp_path, "rope()", lengths=(32, 128)), corpus, store, CPU)
        monkeypatch.setattr(module, "train_run", None)
        more = compare(of(corpus, tmp_path, "rope()"), corpus, store, CPU)
    assert {s.length for s in more} == {32, 64, 128}


def test_same_seed_same_rows(corpus, tmp_path):
    found = []
    for name in "ab":
        plan = of(corpus, tmp_path / name, "randomized(256) + rope()")
        with Store(tmp_path / name / "rows.sqlite") as store:
            found.append(compare(plan, corpus, store, CPU))
    assert found[0] == found[1]


def test_the_same_last_tokens_are_scored_at_every_length(corpus):
    config = DecoderConfig("causal()", length=32, layers=1, dim=16, heads=2, hidden=32)
    model = Decoder(config)
    text = excerpts(corpus, 129, 3, 0)
    for length in (32, 128):
        row = evaluate(model, "text", length, text, 4, "float32")
        logits = model(text[:, -length - 1 : -1]).detach()
        nll = -logits.log_softmax(-1).gather(-1, text[:, -length:, None])[..., 0]
        assert row["value"] == pytest.approx(float(nll[:, -16:].mean()), rel=1e-5)
        assert row["curve"][0][0] == 0 and row["curve"][-1][1] == length
        first, past, loss = row["curve"][2]
        assert loss == pytest.approx(float(nll[:, first:past].mean()), rel=1e-5)


def test_a_task_is_scored_by_whole_answers(corpus):
    class Knows(Decoder):
        """Says every answer right but those of the first rows."""

        wrong, seen = 1, 0

        def forward(self, tokens, *rest):
            rows = task("copy", 32).rows(generator(0, 64, "test copy"), 4, 64, vary=False)
            at = slice(self.seen, self.seen + len(tokens))
            said = torch.nn.functional.one_hot(rows.tokens[at, 1:], 256).float()
            said[: max(0, self.wrong - self.seen), -3] = 0
            self.seen += len(tokens)
            return said

    config = DecoderConfig("causal()", length=32, layers=1, dim=16, heads=2, hidden=32)
    assert evaluate(Knows(config), "copy", 64, None, 4, "float32")["value"] == 0.75


def test_bins_cover_every_position_once():
    losses = torch.rand(3, 300)
    bins = by_position(losses)
    assert edges(300)[:6] == [0, 8, 11, 16, 23, 32] and bins[-1][1] == 300
    assert sum((b - a) * loss for a, b, loss in bins) / 300 == pytest.approx(float(losses.mean()))
    assert tail(losses, 10) == pytest.approx(float(losses[:, -10:].mean()))
    assert edges(5) == [0, 5]


def test_losses_do_not_depend_on_how_many_are_computed_together(monkeypatch):
    from longitude.eval import perplexity as module

    config = DecoderConfig("rope()", length=32, layers=1, dim=16, heads=2, hidden=32)
    model, tokens = Decoder(config), torch.randint(0, 256, (5, 40))
    whole = token_losses(model, tokens)
    monkeypatch.setattr(module, "BATCH_TOKENS", 1)
    torch.testing.assert_close(token_losses(model, tokens), whole)


def test_a_plan_is_checked_whole_before_any_work(corpus):
    options = LabOptions(length=32, steps=2, batch=2, seeds=(0, 1))
    made = make_plan("rope(); alibi()", options, corpus, CPU)
    assert made.lengths == (32, 64, 128, 256, 512) and len(made.runs) == 4
    assert [r.seed for r in made.runs] == [0, 1, 0, 1]
    with pytest.raises(UserError, match="inside rope"):
        make_plan("rope(); rerope(3)", options, corpus, CPU)
    for bad, sentence in [
        ({"test": (1, 64)}, "--test needs at least two tokens"),
        ({"length": 1}, "--length, the shortest length of a test, needs at least two tokens"),
        ({"test": (10**6,)}, "test text has"),
        ({"seeds": ()}, "--seeds names none"),
        ({"excerpts": 0}, "--excerpts must be at least 1"),
        ({"tasks": "text,chess"}, "no task is called 'chess'"),
        ({"size": "huge"}, "no size"),
        ({"length": 10**6}, "a window of 1,000,000 takes"),
        ({"dtype": "int8"}, "--dtype"),
        ({"tasks": "passkey", "batch": 4}, "passkey"),
    ]:
        with pytest.raises(UserError, match=sentence):
            make_plan("rope()", replace(options, **bad), corpus, CPU)


def test_names_for_tables_and_folders(corpus):
    assert label("causal()") == "nope"
    assert label("layers(rope(), rope(), logn(64))") == "2 × (rope()), logn(64)"
    runs = [small(corpus, s, seed=n) for s in ("rope()", "alibi()") for n in (0, 1)]
    names = [slug(run) for run in runs]
    assert len(set(names)) == 4 and names[0].startswith("rope-seed0-")
    assert slug(small(corpus, "layers(" + ", ".join(["rope()"] * 40) + ")")).count("/") == 0
