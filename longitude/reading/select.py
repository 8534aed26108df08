"""Which way to read a text that is longer than the window, and why, in a sentence.

A text that fits is read as it is. Else, what was measured comes first: an extension of the model
that finds what stands far back. Else, for a short answer, windows: side by side where they are few
(the paper of parallel context windows, Ratner et al. 2022, arXiv:2212.10947, goes to three), by
naive Bayes where they are many. A long answer needs more than one window: MemWalker, if the model
can follow what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longitude.core.validate import UserError, shown
from longitude.reading.prior_runs import Extension

WAYS = ("nbce", "windows", "memwalker", "extend")
AUTO = "auto"
SHORT = 64  # tokens of an answer that one window can give
FEW = 3  # windows that stand side by side well


@dataclass(frozen=True)
class Case:
    """What is to be read by whom. `need` is the whole text with the question and the answer."""

    need: int  # tokens
    answer: int  # tokens, at most
    windows: int  # that the text is cut into
    trained: int | None  # the model's window
    chats: bool
    extensions: Sequence[Extension] = ()


@dataclass(frozen=True)
class Choice:
    """A way to read, and why; to extend by nothing is to read as it is."""

    by: str
    why: str
    extension: Extension | None = None


def known(by: str) -> str:
    """The name of a way, or a sentence."""
    if by in (AUTO, *WAYS):
        return by
    raise UserError(f"--by is one of {', '.join((AUTO, *WAYS))}, but got {shown(by)}: use {AUTO}.")


def choose(case: Case) -> Choice:
    """The way that suits a case."""
    if case.trained is not None and case.need <= case.trained:
        why = f"the text fits the model's window of {case.trained:,}, so it is read as it is"
        return Choice("extend", why)
    passed, best = "", fitting(case)
    if best is not None:
        if best.finds:
            return Choice("extend", f"the text fits {best.told}", best)
        passed = f"; {best.told}, would find too little"
    if case.answer > SHORT and case.chats:
        return Choice("memwalker", f"the answer may be long ({case.answer:,} tokens){passed}")
    return _by_windows(case, passed)


def _by_windows(case: Case, passed: str) -> Choice:
    """One of the two ways that read every window at once."""
    what = "the answer is short"
    if case.answer > SHORT:
        what = "the answer may be long, but the model has no chat template to be asked by"
    if case.windows <= FEW:
        return Choice("windows", f"{what} and the windows are few ({case.windows}){passed}")
    return Choice("nbce", f"{what} and the windows are many ({case.windows:,}){passed}")


def fitting(case: Case) -> Extension | None:
    """The measured extension that holds the whole text: one that finds before one that doesn't, the
    shortest first."""
    held = [one for one in case.extensions if one.length >= case.need]
    return min(held, key=lambda one: (not one.finds, one.length), default=None)


def extension_for(case: Case, name: str) -> Extension:
    """The extension that was asked for by name; raises where none was measured so far."""
    best = fitting(case)
    if best is not None:
        return best
    if not case.extensions:
        raise UserError(
            f"no run of `longitude extend` has found an extension of {name}: run `longitude extend "
            f"{name} --to {case.need}` first, name its folder with --runs, or read --by nbce."
        )
    longest = max(case.extensions, key=lambda one: one.length)
    raise UserError(
        f"the text with question and answer takes {case.need:,} tokens, but {longest.label} was "
        f"measured to {longest.length:,} only: run `longitude extend {name} --to {case.need}`, or "
        "read --by nbce."
    )
