"""Metrics, one per file: a module in this folder that defines METRIC is known to every command.

`longitude extend --tasks` offers it, its rows go to the store, and the tables, the terminal and the
report show it. A metric says how it is measured (`measure`), how its numbers become a value with an
interval (`summarise`), and how it is read (title, unit, better, help). A module whose rows hold
several numbers defines METRICS. No module here imports torch at its top: the report reads metrics
where torch may be missing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from longitude.core.validate import UserError
from longitude.eval.records import ResultKey
from longitude.eval.stats import Interval, over_documents, paired

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Value = dict[str, Any]  # the numbers of a row


@dataclass(frozen=True)
class EvalProtocol:
    """How metrics are taken; what decides their numbers is part of the keys of their rows."""

    scored_tokens: int  # at the end of a document, scored with more and more text before them
    tasks: tuple[str, ...] = ("passkey",)
    questions: int = 4  # for each length and depth
    depths: tuple[float, ...] = DEPTHS
    form: str = "landmark"  # of prompts: with or without a line that explains the task
    new_tokens: int = 16  # decoded for the cost
    cost: bool = True
    version: int = 1

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in task_names():
                raise UserError(
                    f"--tasks: no task is called {name!r}: use {', '.join(task_names())} or none."
                )
        if self.questions < 1:
            raise UserError(f"--questions must be at least 1, but got {self.questions}.")


@dataclass(eq=False)
class Session:
    """A loaded model, its tokenizer and the documents: what a metric measures with."""

    model: Any
    tokenizer: Any
    documents: Sequence[Any]  # longitude.eval.documents.Document
    cache: dict[Any, Any] = field(default_factory=dict)  # what methods share: questions, losses
    baseline: Callable[[], AbstractContextManager[None]] | None = (
        None  # inside, no method is applied
    )

    def document(self, key: ResultKey) -> Any:
        """The document that a row is about."""
        return next(d for d in self.documents if d.text == key.text)


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


@dataclass(frozen=True, eq=False)
class Metric:
    """One number per method and length.

    `measure` gets a session, whose model runs the method already, and the keys of some rows of one
    method and length; it returns the numbers of each row. `field` names the number that this metric
    reads in a row; a list there holds one number per question.
    """

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    measure: Callable[[Session, Sequence[ResultKey]], Sequence[Value]]
    help: str
    paper: str = ""
    summarise: Callable[[Sequence[float]], Interval] = over_documents
    difference: Callable[[Sequence[float], Sequence[float]], Interval] = paired
    tie: float | None = None  # relative difference below which two are tied, instead of a test
    rows: str = ""  # the rows it reads, where several metrics read the same ones
    field: str = "value"
    per: Literal["document", "length"] = "length"  # what is measured at once
    selectable: bool = True  # by --tasks
    covers_shorter: bool = False  # a row holds the numbers of every shorter length, too
    settings: Callable[[EvalProtocol], Value] = lambda protocol: {}  # part of the rows' keys
    grid: Callable[[EvalProtocol], Sequence[Mapping[str, float]]] = lambda protocol: [{}]
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


def metrics() -> dict[str, Metric]:
    """Every metric by its name, in the order of columns: the modules in this package's folders."""
    return _metrics(tuple(__path__))


@cache
def _metrics(folders: tuple[str, ...]) -> dict[str, Metric]:
    found: list[Metric] = []
    for module in pkgutil.iter_modules(folders, f"{__name__}."):
        loaded = importlib.import_module(module.name)
        found += getattr(loaded, "METRICS", None) or [loaded.METRIC]
    return {metric.name: metric for metric in sorted(found, key=lambda m: (m.order, m.name))}


def measured_by(rows: str) -> Metric:
    """The metric that measures rows of this kind."""
    return next(metric for metric in metrics().values() if metric.rows == rows)


def task_names() -> list[str]:
    """What --tasks may name."""
    return [name for name, metric in metrics().items() if metric.selectable]
