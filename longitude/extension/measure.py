"""A task becomes rows: the model is patched, the text is read, and the numbers are taken.

Out of memory is a number too: the row says so, and the rest goes on. Where one forward at the
greatest length gives the loss at every shorter one, a shorter forward is made only if that failed.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longitude.core.validate import UserError
from longitude.eval import perplexity as reading
from longitude.eval import prefill as answer
from longitude.eval.cost import cost
from longitude.eval.documents import Document
from longitude.eval.perplexity import by_position
from longitude.eval.question import answered
from longitude.eval.records import CONTEXT, COST, KEYS, LOSS, PASSKEY, VARIABLES, ResultKey
from longitude.eval.tasks import multikey as keys
from longitude.eval.tasks import passkey, variables
from longitude.extension.plan import Method, Plan, Task
from longitude.hf.patch import patched

Value = dict[str, Any]
Keep = Callable[[ResultKey, Value], None]


class Bench:
    """One loaded model and the documents of a plan, ready to run its tasks."""

    def __init__(self, plan: Plan, model: Any, tokenizer: Any, documents: list[Document]) -> None:
        self.plan, self.model, self.tokenizer, self.documents = plan, model, tokenizer, documents
        self.machine = machine(model)
        self.cells: dict[tuple[str, int, float | None], list[Any]] = {}

    def run(self, task: Task, keep: Keep) -> None:
        """Measure a task and hand each row over as soon as it is known."""

        def kept(asked: ResultKey, value: Value, seconds: float) -> None:
            keep(asked, self.row(task.method, value, seconds))

        if task.measure == LOSS:
            self._read(task, kept)
            return
        start, length = time.perf_counter(), task.length
        take = self._cost if task.measure == COST else self._questions
        value = self._taken(task.method, length, lambda: {"rows": take(task, length)})
        rows = self.plan.asked(task)
        values = value.get("rows") or [value] * len(rows)
        each = (time.perf_counter() - start) / len(rows)
        for asked, one in zip(rows, values, strict=True):
            kept(asked, one, each)

    def context(self, method: Method, document: Document, asked: ResultKey) -> Value:
        """The loss of a document's last tokens, as a row's value."""
        start = time.perf_counter()
        value = self._taken(method, asked.length, lambda: self._context(document, asked))
        return self.row(method, value, time.perf_counter() - start)

    def row(self, method: Method, value: Value, seconds: float) -> Value:
        """Numbers with what stands beside them in every row."""
        told = {"label": method.label, "refused": None, "machine": self.machine}
        return {**told, **value, "seconds": round(seconds, 4)}

    # loss by position, and of the last tokens

    def _read(self, task: Task, keep: Callable[[ResultKey, Value, float], None]) -> None:
        assert task.document is not None
        for asked in self._in_order(task):
            start = time.perf_counter()
            value = self._one(task, asked)
            if asked.measure == LOSS and value.get("refused") and not task.method.by_length:
                self._shorter(task, asked, keep)
            keep(asked, value, time.perf_counter() - start)

    def _one(self, task: Task, asked: ResultKey) -> Value:
        document = self.documents[task.document or 0]
        take = self._loss if asked.measure == LOSS else self._context
        return self._taken(task.method, asked.length, lambda: take(document, asked))

    def _shorter(
        self, task: Task, asked: ResultKey, keep: Callable[[ResultKey, Value, float], None]
    ) -> None:
        """The loss at the greatest length that can be had, in place of one that could not."""
        for n in sorted(self.plan.lengths[:-1], reverse=True):
            start = time.perf_counter()
            less = {**asked.protocol, "lengths": [m for m in self.plan.lengths if m <= n]}
            shorter = replace(asked, length=n, protocol=less)
            value = self._one(task, shorter)
            if not value.get("refused"):
                keep(shorter, value, time.perf_counter() - start)
                return

    def _in_order(self, task: Task) -> list[ResultKey]:
        """Longest first, and the loss before the context, which reads the same tokens there."""
        return sorted(self.plan.asked(task), key=lambda a: (-a.length, a.measure == CONTEXT))

    def _loss(self, document: Document, asked: ResultKey) -> Value:
        found = self._losses(document.begun(asked.length))
        means = [[n, float(found[:n].double().mean())] for n in asked.protocol["lengths"]]
        return {"means": means, "bins": [list(b) for b in by_position(found[None])]}

    def _context(self, document: Document, asked: ResultKey) -> Value:
        ids, tail = document.ended(asked.length), min(asked.protocol["tail"], asked.length)
        last = self._remembered(ids)
        last = reading.tail_losses(self.model, ids, tail) if last is None else last[-tail:]
        return {"loss": float(last.double().mean())}

    def _losses(self, ids: Tensor) -> Tensor:
        found = reading.losses(self.model, ids)
        self._last = (ids, found)
        return found

    def _remembered(self, ids: Tensor) -> Tensor | None:
        """The losses of the very tokens that were read just now."""
        before, found = getattr(self, "_last", (None, None))
        self._last = (None, None)
        return found if before is not None and torch.equal(before, ids) else None

    # questions

    def _questions(self, task: Task, length: int) -> list[Value]:
        """The answers by row; all of a length at once, since small models live from batches."""
        rows = self.plan.asked(task)
        each = [self._asked(asked) for asked in rows]
        every = [q for questions in each for q in questions]
        prompts = [torch.tensor(self._ids(q.prompt)) for q in every]
        said = self._said(prompts, length, max(len(self._ids(q.answer)) for q in every) + 2)
        told = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in said)
        judge = passkey.retrieved if task.measure == PASSKEY else answered
        right = iter([bool(judge(q, t)) for q, t in zip(every, told, strict=True)])
        return [{"right": [next(right) for _ in questions]} for questions in each]

    def _said(self, prompts: list[Tensor], length: int, most: int) -> list[list[int]]:
        """What the model goes on with: never past the length, where a table may end."""
        said: dict[int, list[int]] = {}
        for size in sorted({len(p) for p in prompts}):
            which = [i for i, p in enumerate(prompts) if len(p) == size]
            new = min(most, length - size + 1)
            answers = answer.greedy_batch(self.model, [prompts[i] for i in which], new)
            said |= dict(zip(which, answers, strict=True))
        return [said[i] for i in range(len(prompts))]

    def _asked(self, asked: ResultKey) -> list[Any]:
        """The questions of a row: the same for every method, and slow to fit to a length."""
        cell = (asked.measure, asked.length, asked.at.get("depth"))
        if cell not in self.cells:
            count = self.plan.count(asked.measure)
            self.cells[cell] = [self._question(*cell, i) for i in range(count)]
        return self.cells[cell]

    def _question(self, measure: str, length: int, depth: float | None, index: int) -> Any:
        where = "" if depth is None else f" {depth:g}"
        seed = f"{measure} {self.plan.seed} {length}{where} {index}"
        options: Value = {"rng": random.Random(seed), "count": lambda text: len(self._ids(text))}
        options["form"] = self.plan.protocol.form
        if measure == PASSKEY:
            return passkey.passkey(length, depth=depth, **options)
        return {KEYS: keys.keys, VARIABLES: variables.variables}[measure](length, **options)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, verbose=False).input_ids

    # cost

    def _cost(self, task: Task, length: int) -> list[Value]:
        found = cost(self.model, length, new=self.plan.protocol.new)
        return [{"prefill": found.prefill, "decode": found.decode, "peak": found.peak}]

    def _taken(self, method: Method, length: int, take: Callable[[], Value]) -> Value:
        """The numbers under a method, or the sentence why there are none."""
        table = self.plan.subject.family == "learned" and method.patch is None
        if table and length > self.plan.subject.trained:  # on a GPU the lookup would end it all
            return {"refused": f"its table has no position beyond {self.plan.subject.trained}."}
        told = length if method.by_length else None
        try:
            with (
                nullcontext()
                if method.patch is None
                else patched(self.model, method.patch, length=told, check=False)
            ):
                return take()
        except UserError as mistake:
            return {"refused": str(mistake)}
        except Exception as error:
            if not reading.is_out_of_memory(error):
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {"refused": f"out of memory at {length} tokens."}


def machine(model: Any) -> str:
    """The machine in a few words."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
