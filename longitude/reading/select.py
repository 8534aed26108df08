"""The choice of a method for a text that is longer than the window, with its reason.

A text that fits is read by the unmodified model. Otherwise measured results come first: a scheme
that `longitude extend` recommends at this length and that retrieves at least half of the passkeys
(a scheme that forgets may have a low loss, but can't answer from far text). Else, for a short
answer, windows: parallel if they are few (Ratner et al. 2022, arXiv:2212.10947, use up to three),
NBCE if they are many. A long answer needs more than one window: MemWalker, for chat models.

A run of `longitude extend` is used for a model if its rows are of the same weights, or of a model
of the same name, window and scheme in another precision, whose weights have another digest.
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
SHORT_ANSWER = 64  # tokens: a longer one needs more than one window
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
        """Whether it retrieves enough passkeys from far text, or was not measured on them."""
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
    """Choose the method for a text: `need` is its tokens with question and answer, `answer` the
    answer's limit, `windows` how many windows the text makes, `trained` the model's window, `chats`
    whether it has a chat template, `joins` whether windows can be joined in its cache."""
    if trained is not None and need <= trained:
        why = f"the text fits the model's window of {trained:,}, so it is read unmodified"
        return Choice("extend", why)
    rejected, best = "", best_extension(extensions, need)
    if best is not None:
        if best.retrieves:
            return Choice("extend", f"the text fits {best}", best)
        rejected = f"; not enough: {best}"
    if answer > SHORT_ANSWER and chats:
        return Choice("memwalker", f"the answer may be long ({answer:,} tokens){rejected}")
    what = "the answer is short"
    if answer > SHORT_ANSWER:
        what = "the answer may be long, but the model has no chat template for instructions"
    if not joins:
        return Choice("nbce", f"{what} and windows can't be joined in this model's cache{rejected}")
    if windows <= MAX_PARALLEL:
        return Choice("windows", f"{what} and the windows are few (about {windows}){rejected}")
    return Choice("nbce", f"{what} and the windows are many (about {windows:,}){rejected}")


def best_extension(extensions: Sequence[Extension], need: int) -> Extension | None:
    """Return the measured extension that fits the full text: the shortest that retrieves, or else
    the shortest."""
    fitting = [one for one in extensions if one.length >= need]
    return min(fitting, key=lambda one: (not one.retrieves, one.length), default=None)


def required_extension(extensions: Sequence[Extension], need: int, name: str) -> Extension:
    """Return the extension for `--by extend`; raises if none was measured this far."""
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
    """Return what the runs in this folder, or the folder as a run, recommend for the model. Folders
    that are no finished run of the model are skipped."""
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
    """Whether all rows of a run are of this model."""
    matches = set()
    with rows.open(encoding="utf-8") as lines:
        for key in (json.loads(line)["key"] for line in lines):
            if key["kind"] != KIND:
                continue
            other = key["subject"]
            names = {PureWindowsPath(name).name for name in (other["name"], subject.name)}
            equal = all(other[n] == getattr(subject, n) for n in ("scheme", "trained", "revision"))
            other_precision = other["dtype"] != subject.dtype and len(names) == 1 and equal
            matches.add(other["weights"] == subject.weights or other_precision)
    return matches == {True}
