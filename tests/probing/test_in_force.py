"""Which scheme is in force, told from a model of ours behind a server, under each hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude.core.client import Client, OutOfTime
from longitude.core.store import Store
from longitude.hf.patch import probed_layers
from longitude.parts import Window
from longitude.probing.endpoint import Endpoint
from longitude.probing.in_force import Hypothesis, InForce, eight_bits, hypotheses, identify, under
from longitude.probing.reach import ladder

from .servers import Brain, Server, Token, behaving

YARN = "rope(frequencies=yarn(4, original=256))"
TO = 64


@pytest.fixture(autouse=True)
def _two_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each length, of the three that a probe sends."""
    monkeypatch.setattr("longitude.probing.in_force.TEXTS", 2)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)


@pytest.fixture(scope="module")
def reference(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model, tokenizer = tiny
    folder = tmp_path_factory.mktemp("reference")
    lh.apply(model, YARN)
    lh.save(model, folder, tokenizer)
    lh.undo(model)
    yield str(folder)


def brain(model: Any) -> Brain:
    """Greedy bytes with their five likeliest log-probabilities."""

    @torch.no_grad()
    def answer(text: str, new: int) -> list[Token]:
        ids, past, found = [*text.encode()], None, []
        for _ in range(new):
            out = model(torch.tensor([ids]), past_key_values=past, use_cache=True)
            past, top = out.past_key_values, out.logits[0, -1].log_softmax(-1).topk(5)
            ids = [int(top.indices[0])]
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            found.append((chr(ids[0]), {chr(byte): value for byte, value in pairs}))
        return found

    return answer


def fitted(model: Any, served: Hypothesis | None, reference: str, logprobs: bool = True) -> InForce:
    with ExitStack() as stack:
        if served is not None:
            stack.enter_context(under(model, served))
        how = behaving(size=1, logprobs=logprobs)
        server = stack.enter_context(Server(how, brain(model)))
        endpoint = Endpoint(Client(server.url), stack.enter_context(Store(":memory:")))
        endpoint.connect()
        return identify(endpoint, reference, TO, "cpu")


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        *("as meant", "factor lost", "another theta (500,000)", "attention factor lost"),
        *("attention factor squared", "cache in 8 bits (q8_0)", "cache in 8 bits (fp8)"),
    ],
)
def test_each_scheme_is_told_by_its_numbers(
    name: str, logprobs: bool, tiny: Any, reference: str
) -> None:
    if not logprobs and name not in ("as meant", "factor lost"):
        pytest.skip("greedy texts take longer and tell less: two cases are enough")
    model, _ = tiny
    own = [layer.scheme for layer in probed_layers(model)]
    with lh.patched(model, YARN, check=False):
        scheme = lh.scheme_of(model)
    meant = [scheme.layer(n) for n in range(len(own))]
    served = next(one for one in hypotheses(meant, own) if one.name == name)
    result = fitted(model, served, reference, logprobs)
    assert result.as_meant == (name == "as meant") and not result.undecided
    assert result.best.name == name
    if logprobs:
        assert result.best.misfit < 5e-3 and result.fits[1].misfit > 0.02


def test_the_budget_ends_the_fit_after_the_shorter_texts(
    tiny: Any, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    shortest, longer, *_ = ladder(TO)

    def check_time(_: Endpoint) -> None:
        if any(f": as meant, {longer:,} tokens" in what for what in shown):
            raise OutOfTime

    monkeypatch.setattr(Endpoint, "show", lambda _, what: shown.append(what))
    monkeypatch.setattr(Endpoint, "check_time", check_time)
    result = fitted(tiny[0], None, reference)
    assert {*result.best.lengths} == {*result.meant.lengths} == {str(shortest)}
    assert result.best.name == "factor lost"


def test_a_hopeless_hypothesis_is_not_tried_on_longer_texts(tiny: Any, reference: str) -> None:
    result = fitted(tiny[0], None, reference)
    lengths = {fit.name: len(fit.lengths) for fit in result.fits}
    assert lengths["factor lost"] == lengths["as meant"] == len(ladder(TO))
    dropped = [fit for fit in result.fits if lengths[fit.name] < len(ladder(TO))]
    assert dropped and all(fit.misfit > 1 for fit in dropped)


def test_a_dropped_window_is_told(tiny: Any) -> None:
    model, _ = tiny
    own = [layer.scheme for layer in probed_layers(model)]
    windowed = tuple(replace(s, mask=(*s.mask, Window(64))) for s in own)
    tried = {one.name: one for one in hypotheses(windowed, own)}
    assert tried["window dropped"].layers == tuple(own)
    assert tried["as meant"].layers == windowed and "baseline" not in tried
    texts = torch.tensor([list(b"The grass is green. " * 10)])
    with torch.no_grad():
        with under(model, tried["as meant"]):
            seen = model(texts).logits
        with under(model, tried["window dropped"]):
            assert not torch.allclose(model(texts).logits, seen)
            torch.testing.assert_close(model(texts).logits[:, :64], seen[:, :64])


def test_every_hypothesis_of_the_issue_is_tried(tiny: Any) -> None:
    model, _ = tiny
    own = [layer.scheme for layer in probed_layers(model)]
    with lh.patched(model, "rope(base=500000, frequencies=yarn(4, original=256))", check=False):
        scheme = lh.scheme_of(model)
    meant = [replace(scheme.layer(0), mask=(*own[0].mask, Window(64)))] * len(own)
    assert [one.name for one in hypotheses(meant, own)] == [
        "as meant", "factor lost", "theta lost (10,000)", "another theta (1,000,000)",
        "attention factor lost", "attention factor squared", "window dropped", "baseline",
        "cache in 8 bits (q8_0)", "cache in 8 bits (q8_0, keys alone)", "cache in 8 bits (fp8)",
    ]  # fmt: skip


def test_eight_bits_are_llama_cpps_blocks() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    for row, got in zip(x.reshape(-1, 32), eight_bits(x, "q8_0").reshape(-1, 32), strict=True):
        scale = float(row.abs().max()) / 127
        expected = torch.tensor([round(v / scale) for v in row.tolist()])
        stored = torch.tensor(scale).half().float()
        torch.testing.assert_close(got, expected * stored)
    assert (eight_bits(x, "fp8") - x).abs().max() < 0.08 * x.abs().max()


def test_a_run_of_extend_is_a_reference(tiny: Any, tmp_path: Path) -> None:
    import longitude

    options = longitude.ExtendOptions(
        methods="yarn", docs=1, tasks=("passkey",), questions=1, cost=False, out=tmp_path / "run",
        device="cpu", dtype="float32",
    )  # fmt: skip
    run = longitude.extend("tiny-rope", to=512, options=options)
    result = fitted(tiny[0], None, str(tmp_path / "run"))
    # the plain model is served: right only if that is what the run recommends
    assert result.as_meant == (run.best.label == "baseline")
