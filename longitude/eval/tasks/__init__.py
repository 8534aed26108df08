"""Metrics and families of retrieval questions: a module in this folder that defines METRIC (or
METRICS) or FAMILY (or FAMILIES) is known to every command.

`longitude extend --tasks` offers it, its rows go to the store, and the tables, the terminal and the
report show it. A metric says how it is measured (`measure`), how its numbers become a value with an
interval (`summarise`), and how it is read (title, unit, better, help). A family says which facts
are hidden in a text and what is asked about them (`eval/retrieval.py`). No module here imports
torch at its top: the report reads metrics where torch may be missing.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from longitude.core.validate import UserError
from longitude.eval.records import ResultKey
from longitude.eval.stats import Interval, over_documents, paired

Value = dict[str, Any]  # the numbers of a row
ALL = "all"
SMALL_WINDOW = 1024  # tokens: shorter windows get shorter questions


@dataclass(frozen=True)
class EvalProtocol:
    """How metrics are measured; settings that decide numbers are part of the keys of rows."""

    window: int  # of the model, in tokens
    tasks: tuple[str, ...] = (ALL,)
    prompts: int = 2  # of each family, at each length in each round
    stretches: int = 8  # documents of kept context in each round
    rounds: int = 3
    new_tokens: int = 16  # decoded for the cost
    cost: bool = True
    version: int = 2

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in (ALL, *task_names()):
                raise UserError(
                    f"--tasks: no task is called {name!r}: use {', '.join(task_names())}, all or "
                    f"none."
                )
        if self.prompts < 1:
            raise UserError(f"--questions must be at least 1, but got {self.prompts}.")

    @property
    def scored_tokens(self) -> int:
        """How many tokens at a document's end are scored, with more and more text before them."""
        return min(1024, self.window // 2)

    @property
    def selected(self) -> tuple[str, ...]:
        return tuple(task_names()) if ALL in self.tasks else self.tasks

    @property
    def families(self) -> tuple[str, ...]:
        """The selected families of questions."""
        return tuple(name for name in self.selected if name in families())


@dataclass(eq=False)
class Session:
    """A loaded model, its tokenizer and the documents: what a metric measures with."""

    model: Any
    tokenizer: Any
    documents: Sequence[Any]  # longitude.eval.documents.Document
    cache: dict[Any, Any] = field(default_factory=dict)  # what methods share: questions, losses
    baseline: Callable[[], AbstractContextManager[Any]] = nullcontext  # inside, no method applies
    is_baseline: bool = False  # whether the model runs its own scheme
    baseline_reaches: bool = True  # whether the baseline can read this length at all

    def document(self, key: ResultKey) -> Any:
        return next(d for d in self.documents if d.text == key.text)


def percent(value: float) -> str:
    return f"{100 * value:z.0f} %"


@dataclass(frozen=True, eq=False)
class Metric:
    """One number per method and length.

    `measure` gets a session, whose model runs the method already, and the keys of some rows of one
    method and length; it returns the numbers of each row. `field` names the number that this metric
    reads in a row; a list there holds one number per question or document.
    """

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    measure: Callable[[Session, Sequence[ResultKey]], Sequence[Value]]
    help: str
    paper: str = ""
    summarise: Callable[[Sequence[Any]], Interval] = over_documents
    difference: Callable[[Sequence[Any], Sequence[Any]], Interval] = paired
    tie: float | None = None  # relative difference up to which two are tied, instead of a test
    rows: str = ""  # the kind of rows it reads, if several metrics read the same
    field: str = "value"
    per: Literal["document", "length"] = "length"  # what is measured at once
    selectable: bool = True  # by --tasks
    repeated: bool = False  # measured on more documents in each further round
    covers_shorter: bool = False  # a row holds the numbers of every shorter length, too
    settings: Callable[[EvalProtocol], Value] = lambda protocol: {}  # part of the rows' keys
    grid: Callable[[EvalProtocol], Sequence[Mapping[str, Any]]] = lambda protocol: [{}]
    seeded: bool = True  # whether rows depend on the seed
    heading: str = ""  # of a column; without it, the name
    chart: str = ""  # how to read its chart; without it, the help
    format: Callable[[float], str] = lambda value: f"{value:.3f}"
    order: int = 50  # of columns and charts

    def __post_init__(self) -> None:
        for name, default in (("rows", self.name), ("heading", self.name), ("chart", self.help)):
            object.__setattr__(self, name, getattr(self, name) or default)

    @property
    def lower_is_better(self) -> bool:
        return self.better == "lower"

    @property
    def is_share(self) -> bool:
        """Whether its values lie between 0 and 1."""
        return self.unit == "share"


@dataclass(frozen=True)
class Prompt:
    """What a family puts into a text and asks at its end. Facts are scattered over a document, or
    over `sentences`, an endless stream of the family's own. Each question is a text and the answer
    that has to follow it."""

    questions: Sequence[tuple[str, str]]
    facts: Sequence[str] = ()
    sentences: Iterator[str] | None = None


@dataclass(frozen=True, eq=False)
class Family:
    """Questions of one kind. `write(rng, small)` draws a prompt; a small one suits windows under
    1,024 tokens."""

    name: str
    title: str
    help: str
    write: Callable[[random.Random, bool], Prompt]
    paper: str = ""


def metrics() -> dict[str, Metric]:
    """Every metric by name, in column order, found in the modules of this package's folders."""
    return _discover(tuple(__path__))[0]


def families() -> dict[str, Family]:
    """Every family of questions by its name."""
    return _discover(tuple(__path__))[1]


@cache
def _discover(folders: tuple[str, ...]) -> tuple[dict[str, Metric], dict[str, Family]]:
    metrics: list[Metric] = []
    families: list[Family] = []
    for module in pkgutil.iter_modules(folders, f"{__name__}."):
        loaded = vars(importlib.import_module(module.name))
        metrics += loaded.get("METRICS") or filter(None, [loaded.get("METRIC")])
        families += loaded.get("FAMILIES") or filter(None, [loaded.get("FAMILY")])
    metrics.sort(key=lambda m: (m.order, m.name))
    families.sort(key=lambda f: f.name)
    return {metric.name: metric for metric in metrics}, {f.name: f for f in families}


def measured_by(rows: str) -> Metric:
    """The metric that measures rows of this kind."""
    return next(metric for metric in metrics().values() if metric.rows == rows)


def task_names() -> list[str]:
    """The names that --tasks accepts."""
    return [name for name, metric in metrics().items() if metric.selectable] + [*families()]
