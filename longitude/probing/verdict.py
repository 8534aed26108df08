"""The verdict: findings in sentences, each fault with a fix in terms of the runtime's options.

A fault makes the exit code 1; a note does not. Every finding follows from numbers of the probe and
states them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from longitude.core.validate import short
from longitude.probing.agreement import Drift, Repeated, sign_test
from longitude.probing.endpoint import UNSTABLE
from longitude.probing.input_end import InputEnd
from longitude.runtimes import runtimes

if TYPE_CHECKING:
    from longitude.probing.in_force import InForce
    from longitude.probing.reach import Reach

NOISY = 1e-3
# what servers call themselves in their list of models, or in the header `Server`
OWNERS = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "llama.cpp": "llama.cpp",
    "library": "ollama", "ollama": "ollama", "organization_owner": "lm-studio",
    "mlx": "mlx", "mlx-lm": "mlx",
}  # fmt: skip
OTHER_LENGTHS = {
    "ollama": "num_ctx (OLLAMA_CONTEXT_LENGTH, /set parameter num_ctx, or PARAMETER num_ctx in the "
    "Modelfile)",
    "lm-studio": "the context length of the loaded model (lms load --context-length)",
}
CUTS = {
    "front": "drops the front of a long prompt",
    "back": "drops the end of a long prompt, the question with it",
    "middle": "removes the middle of a long prompt",
}


@dataclass(frozen=True)
class Finding:
    name: str
    kind: Literal["fault", "note"]
    sentence: str
    fix: str = ""


def runtime_of(facts: Mapping[str, Any], software: str) -> str:
    """The runtime behind a server, by how it identifies itself; empty if unknown."""
    names = (str(name or "").lower().split("/")[0] for name in (facts.get("owned_by"), software))
    return next((OWNERS[name.strip()] for name in names if name.strip() in OWNERS), "")


def length_fix(runtime: str, tokens: int) -> str:
    """How to make a runtime accept this many tokens."""
    known = runtimes().get(runtime)
    if runtime in OTHER_LENGTHS:
        return f"raise {OTHER_LENGTHS[runtime]} to {tokens}."
    if known is not None and known.lengths:
        note = " (its slots share this context)" if runtime == "llama.cpp" else ""
        return f"start {known.title} with {known.lengths[0]} {tokens}{note}."
    return (
        f"raise the server's context length to {tokens} (--max-model-len in vLLM, -c in llama.cpp, "
        f"num_ctx in Ollama, --context-length in SGLang), and the limit of any proxy before it."
    )


def on_input(end: InputEnd, to: int, runtime: str) -> Iterator[Finding]:
    seen = f"up to {end.length:,} tokens"
    if end.kind == "complete":
        yield Finding("input", "note", f"Every part of a prompt is seen, {seen}.")
    elif end.kind == "refused":
        limit = f"above about {end.limit:,}" if end.limit else "of any length tried"
        message = f" It says: {short(end.message, 160)}" if end.message else ""
        sentence = f"Prompts {limit} tokens are refused.{message}"
        yield Finding("refused", "fault", sentence, length_fix(runtime, to))
    elif end.kind == "all":
        yield Finding(
            "deaf", "fault",
            f"The answer to a prompt of {end.length:,} tokens depends on no part of it.",
            "check that the server passes the prompt on to the model.",
        )  # fmt: skip
    elif end.kind == "unknown":
        noise = end.looks[-1].noise if end.looks else 0.0
        why = "the server gives no log-probabilities, and no answer changed with the text."
        if noise > UNSTABLE:
            why = f"the same prompt, sent twice, gets log-probabilities {noise:.2f} nats apart."
        elif not end.looks:
            why = "the budget ended before that was measured."
        seen = f"It can't be determined whether all {end.length:,} tokens are seen: "
        yield Finding("input unknown", "note", seen + why)
    else:
        yield _cut(end, to, runtime)
    if not end.honest:
        counts = end.looks[-1].counted
        yield Finding(
            "usage", "fault" if end.kind == "complete" else "note",
            f"usage.prompt_tokens is {counts:,} for a prompt of about {end.looks[-1].length:,} "
            f"tokens, which does not fit what is seen of it.",
            "do not rely on the server's count." if end.kind == "complete" else "",
        )  # fmt: skip


def _cut(end: InputEnd, to: int, runtime: str) -> Finding:
    (low, high), look = end.stretch or (0, 1), end.looks[-1]
    about = "" if end.exact else "about "
    first, last = (f"{round(depth * end.length):,}" for depth in (low, high))
    places = f"between tokens {first} and {last} of a prompt of {end.length:,}"
    known = look.counted if end.honest else None
    counted = f", and the server counts {known:,} tokens" if known else ""
    sentence = (
        f"Without an error (status 200) the server {CUTS[end.kind]}: it takes {about}{end.limit:,} "
        f"tokens. What stands {places} makes no difference to the answer{counted}."
    )
    return Finding(f"cut at the {end.kind}", "fault", sentence, length_fix(runtime, to))


def on_reach(reach: Reach, to: int) -> Iterator[Finding]:
    lengths = reach.lengths
    if not lengths:
        return
    first, last = (reach.share(n) for n in (lengths[0], lengths[-1]))
    shares = f"{first.mean:.0%} of {first.n} at {lengths[0]:,} tokens"
    if len(lengths) > 1:
        shares += f", {last.mean:.0%} of {last.n} at {lengths[-1]:,}"
    effective = reach.effective_length
    if effective is None:
        sentence = f"No question is answered, at {lengths[0]:,} tokens neither."
        return (yield Finding("reach", "note", sentence))
    answered = f"Questions answered exactly: {shares}. Effective length: {effective:,} tokens."
    near, far = (
        {(one.family, one.depth, one.index): one.exact for one in reach.at(n)}
        for n in (lengths[0], lengths[-1])
    )
    shared = near.keys() & far.keys()
    won = sum(far[place] > near[place] for place in shared)
    lost = sum(far[place] < near[place] for place in shared)
    p = sign_test(won, lost)
    if effective < lengths[-1] and lost > won and p < 0.05:
        yield Finding(
            "reach", "fault",
            f"{answered} The loss from the shortest length to the longest is statistically "
            f"significant (p = {p:.2g}).",
            "see which scheme is in force (--reference MODEL), or serve no more than the effective "
            "length.",
        )  # fmt: skip
    else:
        yield Finding("reach", "note", answered)


def on_repeats(repeated: Sequence[Repeated]) -> Iterator[Finding]:
    mixed = [one for one in repeated if one.mixed_up]
    if mixed:
        yield Finding(
            "isolation", "fault",
            f"Answers hold the pass keys of other prompts that were sent at the same time "
            f"({', '.join(mixed[0].mixed_up[:3])}, at {mixed[0].length:,} tokens).",
            "turn off what requests share: batching, prefix caching, a proxy's cache.",
        )  # fmt: skip
    for what, names in (("again", "sent twice"), ("beside", "sent beside others")):
        gaps = [gap for one in repeated if (gap := getattr(one, what)) is not None]
        worst = max(gaps, default=0.0)
        if worst > UNSTABLE and not mixed:
            yield Finding(
                "determinism", "fault",
                f"The same prompt, {names}, gets log-probabilities {worst:.2f} nats apart at "
                f"temperature 0.",
                "turn prefix caching, speculation or batching off, one by one, to see which it is.",
            )  # fmt: skip
        elif worst > NOISY:
            sentence = f"The same prompt, {names}, gets log-probabilities {worst:.3f} nats apart."
            yield Finding("noise", "note", sentence)
    if not mixed and any(one.texts_differ for one in repeated):
        yield Finding("texts differ", "note", "The same prompt got different answers at times.")
    elif repeated and not mixed:
        yield Finding("repeats", "note", "The same prompt got the same answer every time.")


def on_drift(drift: Drift) -> Iterator[Finding]:
    won, lost = (sum(getattr(c, name) for c in drift.changes) for name in ("won", "lost"))
    total = sum(c.questions for c in drift.changes)
    gap = "" if drift.gap is None else f" First tokens are {drift.gap:.3f} nats apart on average."
    where = [f"{c.length:,}" for c in drift.changes if c.won or c.lost]
    places = f" (at {', '.join(where)} tokens)" if where else ""
    sentence = (
        f"Against {drift.before}: of {total} questions {won} are answered now that were not, and "
        f"{lost} no longer{places}, p = {drift.p:.2g}.{gap}"
    )
    if drift.other_end:
        was, is_now = (f"{k}{f' at {n:,}' if n else ''}" for k, n in drift.ends)
        sentence += f" The end of the input changed: {was} before, {is_now} now."
    fix = "compare how both servers are started, and their versions." if drift.changed else ""
    yield Finding("drift", "fault" if drift.changed else "note", sentence, fix)


def on_scheme(in_force: InForce, runtime: str, reference: str) -> Iterator[Finding]:
    if in_force.undecided or in_force.as_meant:
        name = "scheme undecided" if in_force.undecided else "scheme"
        return (yield Finding(name, "note", in_force.sentence))
    known = runtimes().get(runtime)
    name = known.name if known else "all"
    where = f" ({known.overrides})" if known and known.overrides else ""
    flags = {"llama.cpp": " (--rope-scaling, --rope-scale, --rope-freq-base)"}
    fix = (
        f"longitude export {reference} --for {name} prints the settings{flags.get(name, where)}; "
        f"start the server with them."
    )
    yield Finding(in_force.best.name, "fault", in_force.sentence, in_force.best.fix or fix)
