"""The probe against a server that misbehaves: each fault is named rightly, and none where there is
none."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import longitude
from longitude.core.client import RefusedError, Retry
from longitude.core.progress import Event
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.probing.agreement import sign_test
from longitude.probing.api import ProbeOptions, ProbeResult, estimate, probe, read_saved, save
from longitude.probing.endpoint import Endpoint, parse
from tests.viz.browser import opens_cleanly

from .servers import Server, behaving, oracle

QUICK = Retry(tries=4, patience=5.0, pause=0.01, longest=0.02)
TO = 2048
LIMIT = 900


@pytest.fixture
def options(tmp_path: Path) -> ProbeOptions:
    return ProbeOptions(
        to=TO, tasks=("passkey", "keys"), questions=1, out=str(tmp_path / "run"), retry=QUICK
    )


def names(result: ProbeResult) -> list[str]:
    return [one.name for one in result.faults]


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_is_named_where_there_is_none(seed: int, options: ProbeOptions) -> None:
    """Twenty models and draws of questions, in every way a faultless server may differ."""
    how = behaving(
        logprobs=seed % 3 != 1, chat_only=seed % 5 == 2, streams=seed % 2 == 0, size=3 + seed % 3,
        usage=("true", "none")[seed % 7 == 3], fails=(429, 500, 503) if seed % 4 == 0 else (),
    )  # fmt: skip
    with Server(how, oracle(seed)) as server:
        result = probe(server.url, options=replace(options, seed=seed, concurrency=1 + seed % 4))
    assert names(result) == []
    assert result.input.kind == "complete" and result.reach.effective_length == TO
    assert all(one.exact for one in result.reach.answers if one.family == "passkey")


@pytest.mark.parametrize("only_streams", ["refuse", "always"])
def test_a_server_that_only_streams_is_probed(only_streams: str, options: ProbeOptions) -> None:
    how = behaving(only_streams=only_streams, chat_only=True, limit=LIMIT, cut="front")
    with Server(how, oracle()) as server:
        result = probe(server.url, options=options)
    assert names(result)[0] == "cut at the front"
    assert "The server answers in streams alone." in result.notes


@pytest.mark.parametrize("usage", ["true", "sent", "none"])
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("cut", ["front", "back", "middle"])
def test_a_silent_cut_is_named_with_its_limit(
    cut: str, logprobs: bool, usage: str, options: ProbeOptions
) -> None:
    how = behaving(limit=LIMIT, cut=cut, logprobs=logprobs, usage=usage)
    with Server(how) as server:
        result = probe(server.url, options=options)
    assert names(result)[0] == f"cut at the {cut}"
    assert result.input.limit == pytest.approx(LIMIT - 16, abs=TO / 40)
    assert result.input.honest == (usage != "sent")
    assert re.search(r"between tokens [\d,]+ and [\d,]+ of a prompt of", result.faults[0].sentence)
    assert result.faults[0].fix == f"start vLLM with --max-model-len {TO}."
    assert max(result.reach.lengths) <= LIMIT  # what is measured afterwards is inside


@pytest.mark.parametrize("named", [True, False])
def test_a_refusal_is_named_with_its_sentence(named: bool, options: ProbeOptions) -> None:
    with Server(behaving(limit=LIMIT, names_limit=named, owner="llamacpp")) as server:
        result = probe(server.url, options=options)
    assert names(result) == ["refused"]
    assert result.input.limit == pytest.approx(LIMIT, abs=40)
    assert "prompt exceeds the context" in result.faults[0].sentence
    assert result.faults[0].fix == f"start llama.cpp with -c {TO} (its slots share this context)."


def test_few_requests_find_the_end(options: ProbeOptions) -> None:
    from longitude.core.client import Client
    from longitude.core.store import Store
    from longitude.probing.endpoint import Endpoint
    from longitude.probing.input_end import find_end, most_requests

    for cut in ("front", "back", "middle", "refuse"):
        with Server(behaving(limit=LIMIT, cut=cut)) as server, Store(":memory:") as store:
            endpoint = Endpoint(Client(server.url, retry=QUICK), store)
            endpoint.connect()
            assert find_end(endpoint, TO).kind == {"refuse": "refused"}.get(cut, cut)
            assert len(server.requests) <= 3 + most_requests(TO) and len(server.requests) < 30


def test_a_model_that_does_not_reach_is_no_cut(options: ProbeOptions) -> None:
    with Server(brain=oracle(reach=2000)) as server:
        result = probe(server.url, options=replace(options, questions=3))
    assert names(result) == ["reach"] and result.input.kind == "complete"
    assert result.reach.effective_length == TO // 4
    assert result.reach.share(TO, depth=1.0).mean == 1 and result.reach.share(TO, depth=0).mean == 0


def test_answers_that_change_and_mix_are_named(options: ProbeOptions) -> None:
    with Server(behaving(noise=0.6)) as server:
        assert set(names(probe(server.url, options=options))) == {"determinism"}
    with Server(behaving(noise=0.004)) as server:
        result = probe(server.url, options=options)
        assert names(result) == [] and "noise" in [one.name for one in result.findings]
    with Server(behaving(bleeds=True, slow=0.02)) as server:
        assert names(probe(server.url, options=replace(options, concurrency=1))) == ["isolation"]


def test_drift_is_named_and_chance_is_not(options: ProbeOptions, tmp_path: Path) -> None:
    saved = tmp_path / "today.json"
    with Server() as server:
        save(probe(server.url, options=options), saved)
        again = probe(server.url, saved, options=replace(options, to=64, tasks=("values",)))
        assert names(again) == [] and again.drift is not None and again.drift.p == 1
    with Server(brain=oracle(reach=1200)) as worse:
        result = probe(worse.url, saved, options=options)
    assert "drift" in names(result) and result.drift is not None and result.drift.significant
    lost = {change.length: change.lost for change in result.drift.changes}
    assert lost[256] == 0 and lost[TO] >= 4
    with Server(behaving(limit=LIMIT, cut="front")) as cut, Server() as right:
        both = probe(cut.url, right.url, options=options)
    assert names(both)[:2] == ["drift", "cut at the front"]
    assert both.drift is not None and both.drift.other_end
    with Server() as one, Server() as other:
        assert names(probe(one.url, other.url, options=options)) == []


def test_the_sign_test_is_the_binomials() -> None:
    assert sign_test(0, 0) == sign_test(3, 3) == 1
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(1, 9) == pytest.approx(2 * 11 / 1024)


def test_it_stays_within_its_bound_and_calls_nobody_else(options: ProbeOptions) -> None:
    messages: list[Event] = []
    how = behaving(limit=LIMIT, cut="middle")
    with Server(how) as server:
        plan = estimate(server.url, options=options)
        assert server.requests == []
        result = probe(server.url, options=replace(options, progress=messages.append))
        assert len(server.requests) <= plan.requests
        assert sum(len(r["prompt"]) // 4 for r in server.requests) <= plan.tokens
        assert {*server.paths} == {"/v1/completions"}
    assert plan.table() == messages[0].stage and result.cost["requests"] == len(server.requests)
    with Server() as elsewhere, Server(behaving(redirect=elsewhere.url)) as server:
        with pytest.raises(UserError, match="307"):
            probe(server.url, options=options)
        assert elsewhere.paths == []


def test_a_stopped_probe_goes_on(options: ProbeOptions) -> None:
    stops = 30

    def stop(event: Event) -> None:
        if event.done >= stops:
            raise KeyboardInterrupt

    with Server() as server:
        with pytest.raises(KeyboardInterrupt):
            probe(server.url, options=replace(options, concurrency=1, progress=stop))
        sent = len(server.requests)
        first = probe(server.url, options=options)
        assert len(server.requests) == first.cost["requests"] >= sent
        second = probe(server.url, options=options)  # one that ended is asked anew
        assert len(server.requests) == 2 * first.cost["requests"]
        assert second.cost["requests"] == first.cost["requests"]


def test_a_server_that_refused_everything_is_asked_anew(options: ProbeOptions) -> None:
    with Server(behaving(limit=2)) as server:  # as one that failed while it started
        with pytest.raises(UserError, match="refuses a prompt of"):
            probe(server.url, options=options)
        server.behaviour = behaving()
        assert probe(server.url, options=options).input.kind == "complete"


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ({"choices": None, "usage": None}, "a reply without choices"),  # was taken for no answer
        (RefusedError("", 401, "no key"), "give its key with --key-file or LONGITUDE_API_KEY."),
    ],
)
def test_a_server_that_gives_no_answer_is_not_probed(reply: Any, sentence: str) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    streamed = {"stream": lambda path, body: [(0.0, post(path, body))]}
    client: Any = SimpleNamespace(url="http://127.0.0.1:1/v1", name="m", post=post, **streamed)
    with Store(":memory:") as store, pytest.raises(UserError, match=sentence):
        Endpoint(client, store).connect()


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_what_a_model_thinks_is_an_answer(name: str) -> None:
    message = {"role": "assistant", "content": None, name: "the key is 7"}
    assert parse({"choices": [{"message": message}]}).text == "the key is 7"


def test_a_budget_ends_it_with_what_is_known(
    options: ProbeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as server:  # a request takes a second of this clock
        clock = SimpleNamespace(monotonic=lambda: len(server.requests))
        for module in ("probing.api", "probing.endpoint", "core.client"):
            monkeypatch.setattr(f"longitude.{module}.time", clock)
        result = probe(server.url, options=replace(options, budget="20", concurrency=1))
        assert len(server.requests) == 21
    assert result.input.kind == "complete" and not result.repeated
    assert "The budget of 20 ended the probe" in " ".join(result.notes)
    assert "No fault found in what was measured before the budget ended." in result.table()


def test_a_budget_that_ends_at_once_claims_nothing(
    options: ProbeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as server:
        clock = SimpleNamespace(monotonic=lambda: len(server.requests))
        for module in ("probing.api", "probing.endpoint", "core.client"):
            monkeypatch.setattr(f"longitude.{module}.time", clock)
        with pytest.raises(UserError, match="did not answer within 1: give a greater --budget"):
            probe(server.url, options=replace(options, budget="1", concurrency=1))
        result = probe(server.url, options=replace(options, budget="4", concurrency=1))
    (finding,) = result.findings
    assert finding.sentence.endswith("tokens are seen: the budget ended before that was measured.")
    assert not result.complete


def test_a_budget_ends_the_wait_for_a_server_that_never_replies(options: ProbeOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        for named in (url, f"{url}#m"):  # waiting for the list of models, and for an answer
            with pytest.raises(UserError, match="did not answer within 1: give a greater --budget"):
                probe(named, options=replace(options, budget="1", retry=QUICK))


def test_a_key_is_sent_and_nowhere_else(options: ProbeOptions, tmp_path: Path) -> None:
    key = "sk-1234567890abcdef"
    with Server() as server:
        result = probe(server.url, options=replace(options, key=key))
        assert {head["authorization"] for head in server.headers} == {f"Bearer {key}"}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert key.encode() not in written and key not in result.table() + repr(options)
    assert key not in repr(replace(options, key=key))


def test_what_a_server_says_is_escaped(options: ProbeOptions, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"

    def brain(text: str, new: int) -> list[Any]:
        return [(evil, {evil: -0.1, text[-3:]: -2.0 - len(text) % 7})]

    with Server(behaving(owner=evil), brain) as server:
        result = probe(server.url, options=options)
    page = result.report(tmp_path / "page.html").read_text()
    opens_cleanly(tmp_path / "page.html")
    assert "<script>alert" not in page and "\x1b" not in result.table() + page
    assert "\x1b" not in json.dumps(result.to_json())


def test_files_that_are_no_probe_are_refused(options: ProbeOptions, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("", "[]", "{}", '{"settings": {"to": 1e99}, "reach": {"questions": []}}'):
        bad.write_text(text)
        with pytest.raises(UserError, match="is no saved probe"):
            read_saved(bad)


def test_text_of_ones_own_is_sent_with_a_warning(options: ProbeOptions, tmp_path: Path) -> None:
    story, messages = tmp_path / "story.txt", []
    story.write_text("Once there was a lighthouse. " * 2000)
    with Server() as server:
        own = replace(options, text=(str(story),), progress=lambda e: messages.append(e.stage))
        assert names(probe(server.url, options=own)) == []
        assert any("lighthouse" in request["prompt"] for request in server.requests)
    assert "--text: your files are sent to the server." in messages


def test_the_public_function_returns_a_result(options: ProbeOptions) -> None:
    with Server(behaving(stated=1024)) as server:
        result = longitude.probe(server.url, options=replace(options, to=None))
    assert result.to == 1024 and result.runtime == "vllm"
    assert json.loads(json.dumps(result.to_json()))["faults"] == 0
    assert "No fault found." in result.table()
