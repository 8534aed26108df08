"""Prompts with questions about a text, of an exact number of tokens, and their answers' losses.

Families that hide facts in a document share one while there is room: facts stand between its lines,
questions and their right answers follow at the end. Families with their own sentences (pass key,
frequent words, many shots) each have a separate text. Texts are assembled as tokens, piece by
piece, so that "at 4,096" means 4,096 tokens, answers included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longitude.core.validate import UserError
from longitude.eval.documents import token_ids
from longitude.eval.perplexity import token_scores
from longitude.eval.prefill import batch_rows
from longitude.eval.records import ResultKey
from longitude.eval.tasks import SMALL_WINDOW, Prompt, Session, families

FACTS_SHARE = 2  # facts and questions of a shared text take at most half of it


@dataclass(frozen=True, eq=False)
class Tokens:
    """A prompt as tokens, and for each question its family and where its answer stands."""

    ids: Int[Tensor, " n"]
    answers: tuple[tuple[str, range], ...]


@dataclass(frozen=True)
class _Draft:
    """The prompts of one text, by family, and the tokens of their questions and facts."""

    parts: dict[str, Prompt]
    facts: list[list[int]]
    questions: list[tuple[str, list[int], list[int]]]  # family, question, answer

    @property
    def scattered(self) -> bool:
        """Whether its facts stand in a document, which other families can share."""
        return all(prompt.sentences is None for prompt in self.parts.values())

    @property
    def size(self) -> int:
        questions = sum(len(question) + len(answer) for _, question, answer in self.questions)
        return questions + sum(map(len, self.facts))


def prompts(session: Session, key: ResultKey, names: Sequence[str]) -> list[Tokens]:
    """The prompts of the named families at the key's length, drawn by its seed and round."""
    texts, encode = [], partial(token_ids, session.tokenizer)
    for index in range(key.protocol["prompts"]):
        rng = random.Random(f"{key.seed} {key.at['round']} {key.length} {index}")
        shared: list[_Draft] = []
        for name in names:
            prompt = families()[name].write(rng, key.protocol["window"] < SMALL_WINDOW)
            questions = [
                (name, encode(f"\n{question}"), encode(f" {answer}"))
                for question, answer in prompt.questions
            ]
            facts = [encode(f"\n{fact}") for fact in prompt.facts]
            draft = _Draft({name: prompt}, facts, questions)
            room = key.length // FACTS_SHARE
            if draft.scattered and shared and shared[-1].size + draft.size <= room:
                shared[-1].parts.update(draft.parts)
                shared[-1].facts.extend(draft.facts)
                shared[-1].questions.extend(draft.questions)
            else:  # the last draft stays one that others can join
                shared.insert(len(shared) if draft.scattered else 0, draft)
        texts += [_tokens(session, draft, key.length, index, rng) for draft in shared]
    return texts


def _tokens(session: Session, draft: _Draft, length: int, index: int, rng: random.Random) -> Tokens:
    """The text with its facts and questions, `length` tokens in all."""
    before = session.documents[0].ids[: session.documents[0].special].tolist()
    room = length - len(before) - draft.size
    if room < 0:
        raise UserError(
            f"the questions of {', '.join(draft.parts)} take {draft.size + len(before)} tokens, "
            f"more than the length of {length}."
        )
    body = _body(session, draft, room, index, rng)
    ids, places = [*before, *body], []
    rng.shuffle(draft.questions)
    for family, question, answer in draft.questions:
        ids += question
        places.append((family, range(len(ids), len(ids) + len(answer))))
        ids += answer
    return Tokens(torch.tensor(ids), tuple(places))


def _body(session: Session, draft: _Draft, room: int, index: int, rng: random.Random) -> list[int]:
    """A family's own sentences or a document, cut to size, with the facts inserted in order at the
    ends of sentences or lines (in a document without lines, anywhere)."""
    sentences = next((p.sentences for p in draft.parts.values() if p.sentences), None)
    if sentences:
        filler, ends = [], []
        tokens = cache(partial(token_ids, session.tokenizer))  # a few sentences recur
        while len(filler) < room:
            filler += tokens(next(sentences))
            ends.append(len(filler))
        cut = len(filler) - room  # tokens to drop at the beginning
        filler, ends = filler[cut:], [end - cut for end in ends]
    else:
        document = session.documents[index % len(session.documents)]
        filler = document.ids[document.special :][:room].tolist()
        breaks: dict[int, bool] = session.cache.setdefault("line breaks", {})
        for token in {*filler} - breaks.keys():
            breaks[token] = "\n" in session.tokenizer.decode([token])
        ends = [i for i, token in enumerate(filler) if breaks[token]] or [*range(len(filler) + 1)]
    places = sorted(rng.choice(ends) for _ in draft.facts)
    body = []
    for start, end, fact in zip([0, *places], places, draft.facts, strict=False):
        body += [*filler[start:end], *fact]
    return [*body, *filler[places[-1] if places else 0 :]]


def answers(model: nn.Module, prompts: Sequence[Tokens]) -> Iterator[tuple[str, bool, float]]:
    """Yield family, exact match and loss of every answer to prompts of one length, from one forward
    per prompt, batched as far as they fit."""
    rows = batch_rows(model, len(prompts[0].ids))
    for batch in (prompts[i : i + rows] for i in range(0, len(prompts), rows)):
        skipped = min(at.start for prompt in batch for _, at in prompt.answers) - 1
        scores = token_scores(model, torch.stack([p.ids for p in batch]), skipped)
        for prompt, losses, hits in zip(batch, *scores, strict=True):
            for family, at in prompt.answers:
                span = slice(at.start - 1 - skipped, at.stop - 1 - skipped)
                yield family, bool(hits[span].all()), float(losses[span].mean())
