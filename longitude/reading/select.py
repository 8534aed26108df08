"""Which method reads a text that is longer than the window, and why.

A text that fits is read by the unmodified model. Otherwise measured results come first: a scheme
that `longitude extend` recommends at this length and that retrieves at least half of the passkeys
(a scheme that forgets may have a low loss, but answers nothing from far back). Else, for a short
answer, windows: parallel if they are few (Ratner et al. 2022, arXiv:2212.10947, use up to three),
NBCE if they are many. A long answer needs more than one window: MemWalker, if the model chats.

A run of `longitude extend` counts for a model if its rows are of these weights, or of a model of
the same name, window and scheme in another precision, whose weights have another digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from longitude.core.validate import UserError
from longitude.eval.records import KIND, Subject, for_longer_context

METHODS = ("nbce", "windows", "memwalker", "extend")
AUTO = "auto"
SHORT_ANSWER = 64  # tokens that one window can give
MAX_PARALLEL = 3  # windows
MIN_PASSKEYS = 0.5  # share retrieved


@dataclass(frozen=True)
class Extension:
    """The recommended scheme of one run, and how far it was measured."""

    run: str
    label: str
    scheme: str
    length: int
    passkeys: float | None  # the share retrieved at this length, if measured

    @property
    def retrieves(self) -> bool:
        """Whether it retrieves what stands far back, as far as was measured."""
        return self.passkeys is None or self.passkeys >= MIN_PASSKEYS

    def __str__(self) -> str:
        measured = f"{self.label}, measured to {self.length:,} tokens in {self.run}"
        if self.passkeys is None:
            return measured
        return f"{measured}, where it retrieves {self.passkeys:.0%} of passkeys"


@dataclass(frozen=True)
class Choice:
    """A method and why; `extend` without an extension is the unmodified model."""

    by: str
    why: str
    extension: Extension | None = None


def choose(
    need: int, answer: int, windows: int, trained: int | None, chats: bool,
    extensions: Sequence[Extension] = (), joins: bool = True,
) -> Choice:  # fmt: skip
    """The method for a text that needs so many tokens with question and answer, the answer so many
    at most, cut into so many windows; `trained` is the model's window, `joins` whether windows can
    be joined in its cache."""
    if trained is not None and need <= trained:
        why = f"the text fits the model's window of {trained:,}, so it is read unmodified"
        return Choice("extend", why)
    passed, best = "", best_extension(extensions, need)
    if best is not None:
        if best.retrieves:
            return Choice("extend", f"the text fits {best}", best)
        passed = f"; not enough: {best}"
    if answer > SHORT_ANSWER and chats:
        return Choice("memwalker", f"the answer may be long ({answer:,} tokens){passed}")
    what = "the answer is short"
    if answer > SHORT_ANSWER:
        what = "the answer may be long, but the model has no chat template for instructions"
    if not joins:
        return Choice("nbce", f"{what} and windows can't be joined in this model's cache{passed}")
    if windows <= MAX_PARALLEL:
        return Choice("windows", f"{what} and the windows are few (about {windows}){passed}")
    return Choice("nbce", f"{what} and the windows are many (about {windows:,}){passed}")


def best_extension(extensions: Sequence[Extension], need: int) -> Extension | None:
    """The measured extension that holds the full text: one that retrieves if there is one, the
    shortest of these."""
    fitting = [one for one in extensions if one.length >= need]
    return min(fitting, key=lambda one: (not one.retrieves, one.length), default=None)


def required_extension(extensions: Sequence[Extension], need: int, name: str) -> Extension:
    """The extension for `--by extend`; raises if none was measured this far."""
    if best := best_extension(extensions, need):
        return best
    if not extensions:
        raise UserError(
            f"no run of `longitude extend` has found an extension of {name}: run `longitude extend "
            f"{name} --to {need}` first, name its folder with --runs, or read --by nbce."
        )
    longest = max(extensions, key=lambda one: one.length)
    raise UserError(
        f"the text with question and answer takes {need:,} tokens, but {longest.label} was "
        f"measured to {longest.length:,} only: run `longitude extend {name} --to {need}`, or read "
        f"--by nbce."
    )


def prior_runs(folder: Path, subject: Subject) -> list[Extension]:
    """What the runs in this folder, or this run itself, recommend for the model; folders that are
    no finished run of it are skipped."""
    if not folder.is_dir():
        return []
    extensions = []
    for run in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        try:
            if not _is_of(run / "rows.jsonl", subject):
                continue
            advice = json.loads((run / "recommendation.json").read_text(encoding="utf-8"))
            if best := for_longer_context(advice):
                numbers = best["numbers"]
                passkeys = float(numbers["passkey"]["mean"]) if numbers.get("passkey") else None
                measured = (str(best["scheme"]), int(numbers["length"]), passkeys)
                extensions.append(Extension(str(run), str(best["label"]), *measured))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return extensions


def _is_of(rows: Path, subject: Subject) -> bool:
    """Whether rows are of this model and of no other."""
    same = set()
    with rows.open(encoding="utf-8") as lines:
        for key in (json.loads(line)["key"] for line in lines):
            if key["kind"] != KIND:
                continue
            one = key["subject"]
            names = {PureWindowsPath(name).name for name in (one["name"], subject.name)}
            alike = all(one[n] == getattr(subject, n) for n in ("scheme", "trained", "revision"))
            other_precision = one["dtype"] != subject.dtype and len(names) == 1 and alike
            same.add(one["weights"] == subject.weights or other_precision)
    return same == {True}
