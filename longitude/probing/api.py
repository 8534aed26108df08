"""`longitude.probe`: what does this server really do with a long prompt?

    result = longitude.probe("http://127.0.0.1:8000/v1", options=longitude.ProbeOptions(to="32k"))
    print(result.table())         # the verdict, and the numbers behind it
    result.report("report.html")  # the page
    result.faults                 # empty if nothing is wrong

Answers go to results.sqlite in the run's folder: repeating a call resumes a probe that was stopped,
and starts afresh after one that was completed. Only the given address is contacted.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.client import Client, OutOfTime, is_url
from longitude.core.progress import Event, TextResult
from longitude.core.store import Store, atomic_file
from longitude.core.validate import UserError, parse_seconds, shown, target_length
from longitude.eval.tasks import families
from longitude.extension.api import writable
from longitude.extension.result import STORE
from longitude.options import ProbeOptions
from longitude.probing import verdict
from longitude.probing.agreement import REQUESTS, Drift, Repeated, compare, repeat
from longitude.probing.endpoint import CALIBRATION, KIND, Endpoint
from longitude.probing.input_end import InputEnd, find_end, most_requests
from longitude.probing.reach import DEPTHS, LONGEST_ECHO, Reach, ladder, measure
from longitude.probing.verdict import Finding, runtime_of

DEFAULT_TO = 32768  # tokens, if the server states no length
LEAST_TO = 64  # a prompt with a key, filler and a question
PAGE, JSON = "report.html", "probe.json"
STATED = ("max_model_len", "n_ctx", "context_length", "n_ctx_train")  # in the list of models
MAX_TEXT = 2**24  # characters of --text


@dataclass(frozen=True)
class ProbeEstimate:
    """An upper bound on what a probe sends."""

    url: str
    model: str
    to: int
    lengths: tuple[int, ...]
    requests: int
    tokens: int

    def table(self, *, color: bool = False, width: int = 100) -> str:
        return (
            f"at most {self.requests:,} requests and {self.tokens:,} tokens of prompts to "
            f"{self.url} ({self.model}), up to {self.to:,} tokens each; no other address is called."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ProbeResult(TextResult):
    """What a server does with long prompts, and what is wrong with it."""

    url: str
    model: str
    runtime: str  # empty if unknown
    to: int
    input: InputEnd
    reach: Reach
    repeated: tuple[Repeated, ...]
    findings: tuple[Finding, ...]
    settings: Mapping[str, Any]  # what reproduces the same prompts
    cost: Mapping[str, Any]  # requests, tokens and seconds
    in_force: Any = None  # longitude.probing.in_force.InForce
    drift: Drift | None = None
    notes: tuple[str, ...] = ()
    complete: bool = True  # everything was measured before the budget ended

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == "fault"]

    @property
    def conclusion(self) -> str:
        """How many faults there are, in a sentence."""
        count = len(self.faults)
        start = f"{count} fault{'s' if count > 1 else ''} found" if count else "No fault found"
        return start + ("." if self.complete else " in what was measured before the budget ended.")

    def show(self, console: Any) -> None:
        """Print the verdict and the numbers behind it."""
        from longitude.viz.probe import show

        show(self, console)

    def report(self, path: str | Path) -> Path:
        """Write a page (.html), or what the terminal shows as Markdown (.md)."""
        from longitude.viz.probe import write

        path = Path(path)
        return write(self, path) if path.suffix.lower() == ".html" else super().report(path)

    def to_json(self) -> dict[str, Any]:
        """Everything; what --save writes and --against reads."""
        plain = ("url", "model", "runtime", "to", "settings", "cost", "notes", "complete")
        parts = {n: getattr(self, n) for n in ("input", "in_force", "reach", "drift")}
        return {
            **{name: getattr(self, name) for name in plain},
            **{name: part and part.to_json() for name, part in parts.items()},
            "faults": len(self.faults),
            "findings": [asdict(one) for one in self.findings],
            "repeated": [asdict(one) for one in self.repeated],
        }


def probe(
    url: str,
    against: str | Path | None = None,
    *,
    options: ProbeOptions = ProbeOptions(),  # noqa: B008 (frozen)
) -> ProbeResult:
    """Find out what a server does with long prompts.

    Args:
        url: of its API, such as http://127.0.0.1:8000/v1.
        against: what to compare it with: the URL of a second server, or a saved probe.
    """
    if against is None:
        return _probe(url, options, {})
    folder = Path(options.out)
    if is_url(against):
        first = _probe(str(against), replace(options, out=folder / "other"), {})
        saved, name = first.to_json(), first.url
    else:
        saved, name = read_saved(Path(against)), str(against)
    result = _probe(url, options, saved["settings"])
    drift = compare(saved, result.to_json(), name)
    findings = (*verdict.on_drift(drift), *result.findings)
    result = replace(result, drift=drift, findings=findings)
    _write(result, folder)
    return result


def estimate(url: str, *, options: ProbeOptions = ProbeOptions()) -> ProbeEstimate:  # noqa: B008
    """An upper bound on what a probe would send; only the list of models is requested."""
    return _bound(_client(url, options), options, {})


def _client(url: str, options: ProbeOptions, deadline: float | None = None) -> Client:
    if options.concurrency < 1 or options.questions < 1:
        raise UserError(
            f"--concurrency and --questions are 1 or more, but got {options.concurrency} and "
            f"{options.questions}."
        )
    for name in options.families:
        if name not in families():
            raise UserError(
                f"--tasks: no family is called {shown(name)}: use {', '.join(families())}, or all."
            )
    named = f"{url.partition('#')[0]}#{options.model}" if options.model else url
    limits: dict[str, Any] = {"timeout": options.timeout, "deadline": deadline}
    try:
        return Client(named, key=options.key, retry=options.retry, **limits)
    except OutOfTime:
        raise _unanswered(url, options) from None


def _unanswered(url: str, options: ProbeOptions) -> UserError:
    return UserError(f"{url} did not answer within {options.budget}: give a greater --budget.")


def _bound(client: Client, options: ProbeOptions, saved: Mapping[str, Any]) -> ProbeEstimate:
    """Plan a probe, with an upper bound on what it sends."""
    from longitude.probing.in_force import TEXTS

    meta = client.facts.get("meta")
    facts = {**(meta if isinstance(meta, dict) else {}), **client.facts}
    stated = [facts[name] for name in STATED if type(facts.get(name)) is int and facts[name] > 0]
    window = stated[0] if stated else DEFAULT_TO
    to = target_length(saved.get("to") or options.to or window, window)
    if to < LEAST_TO:
        raise UserError(f"--to is {LEAST_TO} tokens or more, but got {to}.")
    lengths = saved.get("lengths") or ladder(to)
    names = options.families
    per_length = options.questions * sum(len(DEPTHS) if n == "passkey" else 1 for n in names) + 1
    counts = [per_length * (2 if n <= LONGEST_ECHO else 1) for n in lengths]
    text_sizes = TEXTS * ladder(to) if options.reference else []
    search, repeats = most_requests(to), REQUESTS * min(2, len(lengths))
    requests = len(CALIBRATION) + 4 + len(names) + search + sum(counts) + repeats + len(text_sizes)
    tokens = sum(n * count for n, count in zip(lengths, counts, strict=True))
    tokens += search * to + repeats * to + sum(text_sizes) + 2000
    return ProbeEstimate(client.url, client.name, to, tuple(lengths), requests, tokens)


def _probe(url: str, options: ProbeOptions, saved: Mapping[str, Any]) -> ProbeResult:
    began = time.monotonic()
    seconds = options.budget and parse_seconds(options.budget)
    if saved:  # repeat its questions
        tasks = tuple(map(str, saved["tasks"]))
        options = replace(options, tasks=tasks, questions=saved["questions"], seed=saved["seed"])
    deadline = began + seconds if seconds else None
    client = _client(url, options, deadline)
    bound = _bound(client, options, saved)
    options.progress(Event(bound.table(), 0, 0))
    text = ""
    if options.text:
        from longitude.training.data import read_documents

        options.progress(Event("--text: your files are sent to the server.", 0, 0))
        texts = [d.text.decode(errors="replace") for d in sorted(read_documents(options.text))]
        text = " ".join(" ".join(texts).split())[:MAX_TEXT]
    key = {
        "kind": f"{KIND}-session", "url": client.url, "model": client.name,
        "to": bound.to, "lengths": list(bound.lengths), "tasks": list(options.families),
        "questions": options.questions, "seed": options.seed, "text": list(options.text),
        "reference": options.reference,
    }  # fmt: skip
    folder = writable(Path(options.out))
    with Store(folder / STORE) as store:
        last = store.get(key)
        if last and not last["done"]:
            session = last["id"]
            options.progress(Event("going on with the probe that was stopped", 0, 0))
        else:
            session = uuid.uuid4().hex
        endpoint = Endpoint(
            client, store, session, options.concurrency, options.progress,
            deadline, bound.requests, text,
        )  # fmt: skip
        try:
            endpoint.connect()
        except OutOfTime:
            raise _unanswered(client.url, options) from None
        # only from here on can the session be resumed: after an earlier failure a new one starts
        store.put(key, {"id": session, "done": False})
        result = _stages(endpoint, bound, options, saved)
        cost = {"requests": len(endpoint.known), "tokens": round(endpoint.sent_tokens)}
        cost |= {"seconds": round(time.monotonic() - began, 1), "at_most": asdict(bound)}
        result = replace(result, cost=cost)
        store.put(key, {"id": session, "done": True})
    _write(result, folder)
    return result


def _stages(
    endpoint: Endpoint, bound: ProbeEstimate, options: ProbeOptions, saved: Mapping[str, Any]
) -> ProbeResult:
    """Run one measurement after another until the budget ends."""
    rates = ("tokens_per_character", "overhead", "densities")
    for name in rates if saved else ():  # the same prompts, however this server counts
        setattr(endpoint, name, copy(saved[name]))
    runtime = options.runtime or runtime_of(endpoint.client.facts, endpoint.client.software)
    to, notes = bound.to, [f"Asked through {endpoint.api}."]
    if endpoint.only_streams:
        notes.append("The server answers in streams alone.")
    if not endpoint.with_logprobs:
        notes.append("The server gives no log-probabilities: texts alone were compared.")
    if not endpoint.counted:
        rate = f"{1 / endpoint.tokens_per_character:g} characters per token"
        notes.append(f"The server does not count tokens: lengths are {rate}.")
    end, reach, repeated, in_force = InputEnd("unknown", None, to), Reach(), [], None
    lengths: Sequence[int] = bound.lengths
    try:
        end = find_end(endpoint, to)
        taken = min(to, end.limit or to)
        lengths = saved.get("lengths") or ladder(max(taken, LEAST_TO))
        if options.reference:
            from longitude.probing.in_force import identify

            in_force = identify(endpoint, options.reference, taken, options.device)
        reach = measure(endpoint, lengths, options.families, options.questions, options.seed)
        repeated = repeat(endpoint, [*dict.fromkeys((lengths[0], lengths[-1]))], options.seed)
    except OutOfTime:
        pass
    if endpoint.stopped:
        notes.append(f"The budget of {options.budget} ended the probe before it was through.")
    findings = [
        *verdict.on_input(end, to, runtime),
        *(verdict.on_scheme(in_force, runtime, str(options.reference)) if in_force else ()),
        *verdict.on_reach(reach, to),
        *verdict.on_repeats(repeated),
    ]
    settings = {
        "to": to, "lengths": list(lengths), "seed": options.seed, "tasks": list(options.families),
        "questions": options.questions, **{name: getattr(endpoint, name) for name in rates},
    }  # fmt: skip
    return ProbeResult(
        endpoint.client.url, endpoint.client.name, runtime, to, end, reach, tuple(repeated),
        tuple(findings), settings, {}, in_force, None, tuple(notes), not endpoint.stopped,
    )  # fmt: skip


def read_saved(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        settings, rows = saved["settings"], saved["reach"]["questions"]
        valid = isinstance(rows, list) and isinstance(settings["tasks"], list)
        numbers = [settings[n] for n in ("tokens_per_character", "overhead", "questions", "to")]
        numbers += [*settings["lengths"], *settings["densities"].values(), abs(settings["seed"])]
        valid = valid and all(type(n) in (int, float) and 0 <= n < 1e8 for n in numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        valid, saved = False, {}
    if not valid:
        raise UserError(
            f"{shown(str(path))} is no saved probe: write one with longitude probe URL --save FILE."
        )
    return saved


def check_file(path: Path) -> None:
    """Raise unless --save can write this file."""
    if path.is_dir():
        raise UserError(f"--save {shown(str(path))} is a folder: name a file.")
    writable(path.parent, "--save")


def save(result: ProbeResult, path: Path) -> None:
    """Write a probe for a later --against."""
    text = json.dumps(result.to_json(), indent=1, ensure_ascii=True, allow_nan=False)
    with atomic_file(path) as part:
        part.write_text(f"{text}\n", encoding="utf-8")


def _write(result: ProbeResult, folder: Path) -> None:
    save(result, folder / JSON)
    result.report(folder / PAGE)
