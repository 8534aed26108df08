"""The stretch test: key tokens by their definition, shares by theirs, documents that never meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import longitude.hf as lh
from longitude import UserError
from longitude.eval.documents import documents
from longitude.eval.perplexity import losses
from longitude.eval.records import ResultKey, Subject
from longitude.eval.stats import ratio, ratio_difference, ratio_stderr
from longitude.eval.tasks import EvalProtocol, Session, metrics
from longitude.eval.tasks.kept_context import KEY_GAIN_BYTES, METRIC

SUBJECT = Subject("tiny-rope", "", "rope()", "rope", 256, "float32", "cpu")
PROTOCOL = EvalProtocol(256, stretches=2)


@pytest.fixture(scope="module")
def session() -> Session:
    model, tokenizer = lh.load("tiny-rope", device="cpu", quiet=True)
    return Session(model, tokenizer, documents((), tokenizer, 512, 4, 0, True))


def key(length: int, round: int = 0, **protocol: int) -> ResultKey:
    settings = {**METRIC.settings(PROTOCOL), **protocol}
    return ResultKey("kept_context", SUBJECT, "any", length, at={"round": round}, protocol=settings)


def pieces(session: Session, index: int) -> tuple[torch.Tensor, ...]:
    """Evidence, target, the filler's text and the control of document `index`, by their
    definition: four texts, each of which gives one document, then a second."""
    e, t = 96, 64
    body, slot = session.documents[index % 4].ids, index // 4
    start = slot * (e + t)
    other = session.documents[(index + 2) % 4].ids
    offset = start % (len(other) - e + 1)
    filler = session.documents[(index + 1) % 4].ids
    own = body[start : start + e], body[start + e : start + e + t]
    return *own, filler, other[offset : offset + e]


def gains(session: Session, index: int, length: int | None) -> torch.Tensor:
    """loss(O F T) - loss(E F T) for each token of T."""
    e, t, filler, o = pieces(session, index)
    f = filler[len(filler) - (length - 160) :] if length else filler[:0]
    with_, without = (losses(session.model, torch.cat([x, f, t]))[-64:] for x in (e, o))
    return without - with_


def test_a_share_is_the_gain_on_key_tokens_over_the_baselines_without_filler(
    session: Session,
) -> None:
    (found,) = METRIC.measure(session, [key(256)])
    expected, count = [], 0
    for index in range(2):
        base = gains(session, index, None)
        chosen = base > KEY_GAIN_BYTES
        count += int(chosen.sum())
        far = gains(session, index, 256)
        expected.append((float(far[chosen].sum()), float(base[chosen].sum())))
    assert found["keys"] == count > 0
    assert torch.allclose(torch.tensor(found["gains"]), torch.tensor(expected), atol=1e-3)
    assert found["share"] == pytest.approx(ratio(expected).mean, abs=1e-4)
    assert found["stderr"] == pytest.approx(ratio_stderr(expected), abs=1e-4)


def test_key_tokens_are_the_baselines_whatever_the_method(session: Session) -> None:
    (own,) = METRIC.measure(session, [key(256)])
    session.cache.clear()
    scheme = "rope(remap=rerope(64))"

    @contextmanager
    def baseline() -> Iterator[None]:
        lh.undo(session.model)
        try:
            yield
        finally:
            lh.apply(session.model, scheme)

    lh.apply(session.model, scheme)
    session.baseline = baseline
    (other,) = METRIC.measure(session, [key(256)])
    lh.undo(session.model)
    session.baseline = nullcontext
    bases = [[base for _, base in one["gains"]] for one in (own, other)]
    assert bases[0] == bases[1] and own["keys"] == other["keys"]
    assert own["gains"] != other["gains"]
    session.cache.clear()


def test_rounds_read_other_documents(session: Session) -> None:
    rows = [METRIC.measure(session, [key(256, round)])[0] for round in (0, 1)]
    assert rows[0]["gains"] != rows[1]["gains"]


def test_a_length_without_room_and_texts_without_documents_are_refused(session: Session) -> None:
    with pytest.raises(UserError, match="take 160 tokens, not 128"):
        METRIC.measure(session, [key(128)])
    with pytest.raises(UserError, match="no 13 documents"):
        METRIC.measure(session, [key(256, 6)])
    alone = Session(session.model, session.tokenizer, session.documents[:1])
    with pytest.raises(UserError, match="filler from another document"):
        METRIC.measure(alone, [key(256)])  # its own end would hold the evidence


def test_a_method_that_hides_the_evidence_keeps_nothing(session: Session) -> None:
    METRIC.measure(session, [key(512)])  # chooses the key tokens
    with lh.patched(session.model, "rope(remap=streaming(4, 124))"):
        (found,) = METRIC.measure(session, [key(512)])
    assert abs(found["share"]) < 0.02


def test_sizes_follow_the_window() -> None:
    metric = metrics()["kept_context"]
    sizes = {w: metric.settings(EvalProtocol(w)) for w in (256, 8192, 131072)}
    assert [(s["evidence"], s["target"]) for s in sizes.values()] == [
        (96, 64),
        (3072, 1024),
        (8192, 1024),
    ]


def test_a_ratio_is_of_sums_and_pairs_cancel() -> None:
    a, b = [(1.0, 2.0), (3.0, 4.0), (2.0, 6.0)], [(0.5, 2.0), (2.5, 4.0), (1.5, 6.0)]
    found = ratio(a)
    assert found.mean == 0.5 and found.low < 0.5 < found.high and found.n == 3
    residuals = [part - 0.5 * of for part, of in a]
    expected = (1.5 * sum(r * r for r in residuals)) ** 0.5 / 12
    assert ratio_stderr(a) == pytest.approx(expected)
    gap = ratio_difference(a, b)
    assert gap.mean == pytest.approx(1.5 / 12)
    assert ratio([(1.0, 2.0)]).low == 0.5 and ratio([]).n == 0
