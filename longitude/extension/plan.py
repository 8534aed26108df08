"""What an extension measures, laid out before anything runs: tasks, and the rows each will leave.

A task is one method on one document, or one length of its questions or its cost. Its rows are
known beforehand by their keys, so a task whose rows are all recorded is never run, and what a
killed run has done is not done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longitude.core.validate import UserError
from longitude.eval.records import CONTEXT, COST, LOSS, PASSKEY, ResultKey, Subject, Text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TASKS = (PASSKEY, "keys", "variables")  # what --tasks may name


@dataclass(frozen=True)
class Method:
    """A way to read on: its label, the full scheme that it runs, and what to patch the model with
    (None: the model as it is)."""

    label: str
    scheme: str
    patch: str | None
    by_length: bool = False


@dataclass(frozen=True)
class Protocol:
    """How each measure is taken; what decides its numbers stands in its rows' keys."""

    tail: int  # tokens that are scored with more and more before them
    tasks: tuple[str, ...] = (PASSKEY,)
    questions: int = 4  # in each cell of a passkey's length and depth
    depths: tuple[float, ...] = DEPTHS
    form: str = "landmark"  # of passkeys and the other tasks
    new: int = 16  # tokens decoded for the cost
    cost: bool = True
    version: int = 1

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                raise UserError(
                    f"--tasks: no task is called {name!r}: use {', '.join(TASKS)} or none."
                )
        if self.questions < 1:
            raise UserError(f"--questions must be at least 1, but got {self.questions}.")


@dataclass(frozen=True)
class Task:
    """One method on one document (loss and context), or one length of questions or of cost."""

    method: Method
    measure: str
    document: int | None = None
    length: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows of a run."""

    subject: Subject
    methods: tuple[Method, ...]
    lengths: tuple[int, ...]
    texts: tuple[Text, ...]
    protocol: Protocol
    seed: int = 0
    question_lengths: tuple[int, ...] = ()  # where questions are asked; without any, at all

    @property
    def target(self) -> int:
        return self.lengths[-1]

    def tasks(self) -> list[Task]:
        """In the order in which they tell most: documents first, then questions, then cost."""
        found: list[Task] = []
        for method in self.methods:
            found += [Task(method, LOSS, document=d) for d in range(len(self.texts))]
        for method in self.methods:
            found += [task for name in self.protocol.tasks for task in self.questions(method, name)]
        for method in self.methods if self.protocol.cost else ():
            found += [Task(method, COST, length=n) for n in self.lengths]
        return found

    def questions(self, method: Method, name: str) -> Iterator[Task]:
        """A method's tasks of one kind of question, by length."""
        return (Task(method, name, length=n) for n in self.question_lengths or self.lengths)

    def asked(self, task: Task) -> list[ResultKey]:
        """The rows that a task leaves."""
        if task.measure == LOSS:
            assert task.document is not None
            text = self.texts[task.document]
            lengths = self.lengths if task.method.by_length else (self.target,)
            loss = [self._loss(task.method, text, n) for n in lengths]
            return [*loss, *(self._context(task.method, text, n) for n in self.lengths)]
        return [self._cost(task)] if task.measure == COST else [*self._cells(task)]

    def _loss(self, method: Method, text: Text, length: int) -> ResultKey:
        within = [n for n in self.lengths if n <= length] if not method.by_length else [length]
        return self._base(method, LOSS, length, text=text, protocol={"lengths": within})

    def _context(self, method: Method, text: Text, length: int) -> ResultKey:
        # documents are cut for the greatest length, so a text's digest tells it
        protocol = {"tail": self.protocol.tail}
        return self._base(method, CONTEXT, length, text=text, protocol=protocol)

    def _cells(self, task: Task) -> Iterator[ResultKey]:
        """A row for each depth, where there are depths."""
        depths = self.protocol.depths if task.measure == PASSKEY else (None,)
        asked = {"questions": self.count(task.measure), "form": self.protocol.form}
        for depth in depths:
            at = {} if depth is None else {"depth": depth}
            yield self._base(task.method, task.measure, task.length, at=at, protocol=asked)

    def _cost(self, task: Task) -> ResultKey:
        protocol = {"new": self.protocol.new}
        return self._base(task.method, COST, task.length, protocol=protocol)

    def count(self, measure: str) -> int:
        """How many questions a row has: without depths as many as all depths together."""
        deep = measure == PASSKEY
        return self.protocol.questions * (1 if deep else len(self.protocol.depths))

    def asks(self, task: Task) -> int:
        """How many questions a task has."""
        return self.protocol.questions * len(self.protocol.depths)

    def _base(self, method: Method, measure: str, length: int, **more: Any) -> ResultKey:
        protocol = {"version": self.protocol.version, **more.pop("protocol", {})}
        drawn = self.seed if measure in TASKS else 0  # other numbers don't depend on it
        return ResultKey(
            measure, self.subject, method.scheme, length, protocol=protocol, seed=drawn, **more
        )
