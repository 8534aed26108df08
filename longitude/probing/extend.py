"""`longitude extend URL`: a server's one scheme, measured by the protocol of `extend` as far as its
API allows (retrieval by family and length, the answers' loss if it returns log-probabilities,
speed), with the same rows and the same report. What needs the weights (loss, kept context, other
methods) requires a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from longitude.core.store import Store, address
from longitude.core.validate import UserError
from longitude.eval.records import BASELINE, COST, RETRIEVAL, Measurement, ResultKey, Subject
from longitude.eval.tasks import ALL, EvalProtocol, families
from longitude.extension.advice import Advice, Recommendation
from longitude.extension.plan import ExtendOptions
from longitude.extension.result import STORE, ExtendResult
from longitude.probing.api import ProbeEstimate, ProbeOptions, ProbeResult, estimate, probe

SCHEME = "as served"  # the scheme is unknown: `probe --reference` identifies it
FOLDER = "runs/served"
KEY = "LONGITUDE_API_KEY"


def extend_server(url: str, to: int | str | None, options: ExtendOptions) -> ExtendResult:
    """Measure a server, and write the run's folder."""
    folder = Path(options.out or FOLDER)
    probed = probe(url, options=_options(to, options, folder))
    rows = [*_rows(probed, options.seed)]
    if not rows:
        raise UserError(f"{url} answered no question within its limits: see {folder}/probe.")
    # the verdict takes the place of a recommendation: there is nothing to choose
    faults = " ".join(finding.sentence for finding in probed.faults) or probed.conclusion
    reached = probed.reach.effective_length
    numbers = {"label": BASELINE, "own": BASELINE, "effective_length": reached}
    best = Advice("the server", BASELINE, None, faults, {**numbers, "in_window_cost": None})
    lengths = {} if reached is None else {BASELINE: reached}
    advice = Recommendation("context", best, (), (), None, False, lengths).to_json()
    notes = [finding.sentence for finding in probed.findings if finding.kind == "note"]
    basis = "The effective length is by retrieval: kept context needs the weights."
    advice |= {"notes": [*notes, basis, *probed.notes]}
    steps = [("See what it does with long prompts", f"longitude probe {probed.url}")]
    result = ExtendResult(rows, advice, steps, folder)
    with Store(folder / STORE) as store:
        for row in rows:
            store.put(row.key.to_json(), row.value)
        result.write(folder, store)
    return result


def estimate_server(url: str, to: int | str | None, options: ExtendOptions) -> ProbeEstimate:
    """An upper bound on what `extend_server` would send."""
    return estimate(url, options=_options(to, options, Path(FOLDER)))


def _options(to: int | str | None, options: ExtendOptions, folder: Path) -> ProbeOptions:
    unsupported = {
        "--methods": options.methods != "auto", "--search": options.search,
        "--lm-eval": bool(options.lm_eval), "--engine": options.engine != "local",
        "--lengths": bool(options.lengths),
        "--context-parallel": options.context_parallel not in (None, 1),
    }  # fmt: skip
    if wrong := [name for name, is_given in unsupported.items() if is_given]:
        raise UserError(
            f"{', '.join(wrong)} needs a checkpoint, but a server runs one scheme: leave it out, "
            f"or give the checkpoint."
        )
    EvalProtocol(1, options.tasks)  # raises for unknown tasks
    names = tuple(name for name in options.tasks if name in families())
    return ProbeOptions(
        to=to, tasks=(ALL,) if ALL in options.tasks or not names else names,
        questions=options.questions or 2, budget=options.budget, text=options.text,
        key=os.environ.get(KEY) or None, seed=options.seed, out=folder / "probe",
        progress=options.progress,
    )  # fmt: skip


def _rows(probed: ProbeResult, seed: int) -> Iterator[Measurement]:
    """Retrieval by family and length, and the cost by length."""
    reach, weights = probed.reach, address({"url": probed.url, "model": probed.model})
    dtype = probed.runtime or "unknown"
    subject = Subject(probed.model, weights, SCHEME, "served", probed.to, dtype, probed.url)
    common = {"label": BASELINE, "refused": None, "machine": probed.url, "seconds": 0.0}
    protocol = {"served": True, "questions": probed.settings["questions"]}
    for length in reach.lengths:
        for family in reach.families:
            answers = reach.at(length, family)
            if not answers:
                continue
            losses = [a.loss for a in answers if a.loss is not None]
            value: dict[str, Any] = {"family": family, "exacts": [a.exact for a in answers]}
            value["exact"] = fmean(value["exacts"])
            if len(losses) == len(answers):
                value |= {"losses": losses, "loss": fmean(losses)}
            at = {"family": family, "round": 0}
            key = ResultKey(RETRIEVAL, subject, SCHEME, length, None, at, protocol, seed)
            yield Measurement(key, {**common, **value})
    for speed in reach.speeds:
        if speed.first:
            decode = {"decode": 1000 / speed.decode} if speed.decode else {}
            value = {"prefill": speed.length / speed.first, "speed": (1.0, 1.0, 1.0), **decode}
            key = ResultKey(COST, subject, SCHEME, speed.length, protocol={"served": True})
            yield Measurement(key, {**common, **value})
