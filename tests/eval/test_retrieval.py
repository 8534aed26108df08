"""Retrieval from one forward: exact match is what greedy decoding would say, to the token."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch.nn import functional as F

import longitude.hf as lh
from longitude import UserError
from longitude.eval.documents import documents
from longitude.eval.prefill import greedy
from longitude.eval.records import ResultKey, Subject
from longitude.eval.retrieval import Tokens, answers, prompts
from longitude.eval.tasks import Session, families, metrics
from longitude.eval.tasks.questions import PAIRS

SUBJECT = Subject("tiny-rope", "", "rope()", "rope", 256, "float32", "cpu")
EVERY = ["association", "frequent_words", "keys", "many_shot", "passkey", "values", "variables"]


@pytest.fixture(scope="module")
def session() -> Session:
    model, tokenizer = lh.load("tiny-rope", device="cpu", quiet=True)
    return Session(model, tokenizer, documents((), tokenizer, 2048, 2, 0, True))


def made(
    session: Session,
    length: int,
    names: list[str],
    window: int = 256,
    count: int = 1,
    seed: int = 0,
) -> list[Tokens]:
    protocol = {"prompts": count, "window": window}
    at = {"round": 0}
    key = ResultKey("retrieval", SUBJECT, "", length, at=at, protocol=protocol, seed=seed)
    return prompts(session, key, names)


def test_the_families() -> None:
    assert sorted(families()) == EVERY
    assert all(f.help and f.title and f.paper for f in families().values())


@pytest.mark.parametrize("window", [256, 8192])
@pytest.mark.parametrize("length", [256, 500, 2048])
def test_prompts_have_the_length_to_the_token(session: Session, length: int, window: int) -> None:
    if window > length:
        length = 2048
    found = made(session, length, EVERY, window, count=2)
    assert {len(one.ids) for one in found} == {length}
    asked = [family for one in found for family, _ in one.answers]
    assert {*asked} == {*EVERY}
    for one in found:
        assert one.answers[-1][1].stop == length  # nothing follows the last answer


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_exact_match_is_what_greedy_decoding_says(session: Session, seed: int) -> None:
    right, together = set(), made(session, 256, EVERY, seed=seed)
    found = answers(session.model, together)
    for prompt in together:
        logits = session.model(prompt.ids[None, :-1]).logits[0]
        for (family, at), (named, exact, loss) in zip(prompt.answers, found, strict=False):
            said = greedy(session.model, prompt.ids[: at.start], len(at), stop=())
            assert named == family
            assert exact is (said == prompt.ids[at.start : at.stop].tolist())
            right |= {family} if exact else set()
            expected = F.cross_entropy(
                logits[at.start - 1 : at.stop - 1], prompt.ids[at.start : at.stop]
            )
            assert loss == pytest.approx(float(expected), abs=1e-4)
    assert "passkey" in right  # or the test would show nothing


def test_every_method_is_asked_the_same(session: Session) -> None:
    first, again = (made(session, 512, EVERY) for _ in range(2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    other = made(session, 512, EVERY, seed=1)
    assert not all(torch.equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))


def test_facts_stand_in_the_text_before_their_questions(session: Session) -> None:
    (prompt,) = made(session, 2048, ["keys"], window=8192)
    text = session.tokenizer.decode(prompt.ids)
    facts = re.findall(r"\nThe number of the (\w+) is (\d{5})\.", text)
    asked = re.findall(r"\? The number of the (\w+) is (\d{5})", text)
    assert len(facts) == 8 and sorted(facts) == sorted(asked)
    assert text.index("?") > max(text.index(f"{number}.") for _, number in facts)


def test_families_that_hide_facts_share_a_text(session: Session) -> None:
    found = made(session, 2048, EVERY)
    together = [{family for family, _ in one.answers} for one in found]
    assert {"association", "keys", "values", "variables"} in together
    assert all({alone} in together for alone in ("frequent_words", "many_shot", "passkey"))


def test_a_needle_shares_no_word_with_its_question() -> None:
    common = {"the", "a", "is", "it", "you", "who", "could", "has", "been", "in", "of", "to", "at"}
    for fact, question in PAIRS:
        words = [set(re.findall(r"[a-z]+", text.lower())) - common for text in (fact, question)]
        stems = [{word[:5] for word in each} for each in words]
        assert not stems[0] & stems[1]


def test_chains_of_variables_lead_to_their_answers() -> None:
    prompt = families()["variables"].write(random.Random(3), False)
    held: dict[str, str] = {}
    for fact in prompt.facts:
        name, value = re.findall(r"Let (\w+) be (\w+)\.", fact)[0]
        held[name] = held.get(value, value)
    for question, answer in prompt.questions:
        value = re.findall(r"hold (\d+)\?", question)[0]
        assert [name for name in answer.split(", ") if held[name] != value] == []
        assert sum(v == value for v in held.values()) == len(answer.split(", ")) == 5


def test_the_most_frequent_word_is_the_answer() -> None:
    prompt = families()["frequent_words"].write(random.Random(0), False)
    assert prompt.sentences is not None
    words = [next(prompt.sentences).strip() for _ in range(500)]
    assert max(set(words), key=words.count) == prompt.questions[0][1]


def test_words_that_are_asked_for_are_not_among_the_shots() -> None:
    prompt = families()["many_shot"].write(random.Random(0), False)
    assert prompt.sentences is not None
    shots = dict(next(prompt.sentences).strip().split(": ") for _ in range(400))
    assert {q.rstrip(":") for q, _ in prompt.questions}.isdisjoint(shots)
    assert {label for _, label in prompt.questions} <= {*shots.values()}


def test_a_length_without_room_is_refused(session: Session) -> None:
    with pytest.raises(UserError, match="more than the length of 64"):
        made(session, 64, ["keys"], window=8192)


def test_rows_have_each_family(session: Session) -> None:
    protocol = {"prompts": 1, "window": 256}
    keys = [
        ResultKey("retrieval", SUBJECT, "", 256, at={"family": f, "round": 0}, protocol=protocol)
        for f in ("keys", "passkey")
    ]
    rows = metrics()["retrieval"].measure(session, keys)
    assert [row["family"] for row in rows] == ["keys", "passkey"]
    assert all(len(row["exacts"]) == len(row["losses"]) == 1 for row in rows)
    assert rows[1]["exact"] == 1.0 and rows[1]["loss"] < 0.1
