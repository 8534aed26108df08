"""Write the page of agreement with RULER: how its tasks and our own questions rank the methods.

python docs/scripts/ruler.py prompts MODEL FILE.jsonl.gz     writes lm-eval's prompts
python docs/scripts/ruler.py measure MODEL FILE.jsonl.gz     measures on them and on our families
python docs/scripts/ruler.py                                 writes the tables
python docs/scripts/ruler.py --check                         fails when they are stale

Only `prompts` needs lm-eval. RULER's score is the share of the right answers that occur in a greedy
generation; besides, the loss of the right answers is measured, from the same prefill. Prompts run
in batches and are padded on the left with line breaks. Cells that are already recorded are not
measured again.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import correlation, fmean
from tempfile import TemporaryDirectory
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.records import RETRIEVAL, Measurement, ResultKey, from_row

PAGE = Path(__file__).parents[1] / "results" / "ruler.md"
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)
# RULER's tasks whose texts lm-eval generates offline: the others download essays or questions
TASKS = ("niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe")
RULER = "ruler"  # the kind of the rows, and the folder of lm-eval's tasks
SEED = 1234
CHECK_EVERY = 16  # new tokens: a batch ends when the score of every prompt is final
RESAMPLED = 1000  # bootstrap samples, for the intervals
Cells = dict[str, dict[str, list[float]]]  # numbers by cell (a task at a length) and by method


def main(arguments: Sequence[str], page: Path = PAGE) -> None:
    """Run the step that is named; without one, write the tables, or fail if they are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", nargs="?", choices=("prompts", "measure"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lengths", default="16384,32768")
    parser.add_argument("--samples", type=int, default=8, help="of each task at each length")
    parser.add_argument("--methods", default="auto", help="as of `longitude extend`")
    parser.add_argument("--to", type=int, default=32768, help="the target of the methods")
    parser.add_argument("--text", nargs="*", default=[], help="documents of our families")
    parser.add_argument("--questions", type=int, default=4, help="prompts of each of our families")
    parser.add_argument("--batch", type=int, default=24, help="prompts that run together")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=Path, default=page.with_suffix(".jsonl"))
    given = parser.parse_args(arguments)
    given.lengths = tuple(map(int, given.lengths.split(",")))
    if given.step == "prompts":
        write_prompts(given)
    elif given.step == "measure":
        measure(given)
    else:
        old = page.read_text(encoding="utf-8")
        new = BETWEEN.sub(lambda _: f"\n{tables(recorded(given.rows))}\n", old)
        if given.check and new != old:
            sys.exit(f"{page.name}'s tables are not those of its rows: run make docs-table.")
        page.write_text(new, encoding="utf-8")


# prompts


def write_prompts(given: argparse.Namespace) -> None:
    """Write the prompts of lm-eval's tasks for a model's tokenizer, with their right answers."""
    from unittest.mock import patch

    import datasets  # noqa: F401  # imported here: its progress bars must not be patched below
    import lm_eval.tasks  # type: ignore[import-not-found]
    import numpy as np

    import longitude.hf as lh

    _, tokenizer = lh.load(given.model, device="cpu", quiet=True)
    with (
        TemporaryDirectory() as folder,
        gzip.open(given.file, "wt", encoding="utf-8") as out,
        # lm-eval writes 500 samples of each task whatever the limit, under a progress bar
        patch("tqdm.tqdm", lambda items, **_: islice(items, given.samples)),
    ):
        tokenizer.save_pretrained(folder)
        for length in given.lengths:
            manager = lm_eval.tasks.TaskManager(
                include_path=str(Path(lm_eval.tasks.__file__).parent / RULER),
                include_defaults=False,  # indexing all tasks takes minutes
                metadata={"max_seq_lengths": [length], "tokenizer": folder},
            )
            for name in TASKS:
                random.seed(SEED)
                np.random.seed(SEED)
                task = manager.load(name)["tasks"][name]
                task.build_all_requests(limit=given.samples, rank=0, world_size=1)
                for index, instance in enumerate(task.instances):
                    text, options = instance.args
                    row = {"task": name, "length": length, "sample": index, "prompt": text}
                    row |= {"answers": instance.doc["outputs"], "new": options["max_gen_toks"]}
                    out.write(json.dumps(row) + "\n")


def read_prompts(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the longest `samples` prompts of each task at each length that is measured."""
    with gzip.open(given.file, "rt", encoding="utf-8") as lines:
        prompts = sorted(map(json.loads, lines), key=lambda p: -len(p["prompt"]))
    cells = [(length, task) for length in given.lengths for task in TASKS]
    by_cell = ([p for p in prompts if (p["length"], p["task"]) == cell] for cell in cells)
    return [p for cell in by_cell for p in cell[: given.samples]]


def answer_text(prompt: Mapping[str, Any]) -> str:
    """Return the right answers as RULER's own examples write them."""
    numbered = prompt["task"] == "ruler_cwe"
    answers = [f"{n}. {a}" if numbered else a for n, a in enumerate(prompt["answers"], 1)]
    return " " + " ".join(answers)


# measuring


def measure(given: argparse.Namespace) -> None:
    """Measure what is not recorded yet; rows are written after each method and length."""
    from longitude.eval.tasks import families
    from longitude.extension.measure import Evaluator, missing, run_tasks
    from longitude.extension.plan import ExtendOptions, TargetModel, prepare

    options = ExtendOptions(
        methods=given.methods, lengths=given.lengths, text=tuple(given.text), device=given.device,
        tasks=tuple(families()), questions=given.questions, cost=False,
    )  # fmt: skip
    prepared = prepare(TargetModel.load(given.model, options), given.to, options)
    plan, prompts = prepared.plan, read_prompts(given)
    evaluator = Evaluator(plan, prepared.target, prepared.documents)
    with Store(":memory:") as store:
        if given.rows.exists():
            store.load(given.rows)
        for task in plan.tasks():
            if task.measure == RETRIEVAL and task.length in given.lengths:
                run_tasks(evaluator, missing(plan, [task], store), store)
        for length in given.lengths:
            here = [p for p in prompts if p["length"] == length]
            for method in plan.methods:
                start, failed = time.perf_counter(), ""
                try:
                    measure_ruler(evaluator, method, here, store, given.batch)
                except (RuntimeError, UserError) as error:  # e.g. out of memory: others may fit
                    failed = f" ({error})"
                store.export(given.rows)
                seconds = time.perf_counter() - start
                print(f"{length:,} tokens, {method.label}: {seconds:.0f} s{failed}", flush=True)


def measure_ruler(
    evaluator: Any, method: Any, prompts: Sequence[Mapping[str, Any]], store: Store, batch: int
) -> None:
    """Measure one method at one length, and store a row for each task."""
    keys, length = {}, prompts[0]["length"]
    for task in dict.fromkeys(p["task"] for p in prompts):
        texts = "".join(p["prompt"] for p in prompts if p["task"] == task)
        protocol = {"prompts": hashlib.sha256(texts.encode()).hexdigest()[:16]}
        subject = evaluator.plan.subject
        key = ResultKey(RULER, subject, method.scheme, length, at={"task": task}, protocol=protocol)
        keys[task] = {**key.to_json(), "kind": RULER}
    if all(store.get(key) for key in keys.values()):
        return
    results: dict[str, list[dict[str, Any]]] = {task: [] for task in keys}
    tokenizer = evaluator.target.tokenizer
    ordered = sorted(prompts, key=lambda p: -len(tokenizer(p["prompt"], verbose=False).input_ids))
    for first in range(0, len(ordered), batch):
        rows = ordered[first : first + batch]
        for prompt, result in zip(rows, run_batch(evaluator, method, rows), strict=True):
            results[prompt["task"]].append(result)
    for task, key in keys.items():
        lists = {name: [output[name] for output in results[task]] for name in results[task][0]}
        store.put(key, evaluator.row(method, lists))


def run_batch(
    evaluator: Any, method: Any, prompts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the loss of each prompt's answers and the score of its greedily decoded text."""
    from contextlib import nullcontext

    import torch
    from torch.nn import functional as F

    from longitude.eval.prefill import decode_step, eos_tokens, forward, input_device, lm_head
    from longitude.eval.prefill import prefill as prefill_model
    from longitude.hf.patch import patched

    model, tokenizer = evaluator.target.model, evaluator.target.tokenizer
    ids = padded([tokenizer(p["prompt"], verbose=False).input_ids for p in prompts], tokenizer)
    answers = [
        tokenizer(answer_text(p), add_special_tokens=False).input_ids[: p["new"]] for p in prompts
    ]
    longest, new = max(map(len, answers)), max(p["new"] for p in prompts)
    labels = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in answers])
    labels = labels.to(input_device(model))
    # dynamic frequencies depend on the length of the text, including generated tokens
    total = len(ids[0]) + new if method.by_length else None
    change = patched(model, method.patch, length=total, check=False) if method.patch else None
    with torch.no_grad(), change or nullcontext():
        # in one forward: with an empty cache, no mask is built
        *_, state = prefill_model(model, torch.tensor(ids), chunk=len(ids[0]), keep_cache=True)
        scored = forward(model, labels[:, :-1].clamp(min=0), lm_head(model), cache=state.cache)
        logits = torch.cat([state.logits[:, None].float(), lm_head(model)(scored.hidden)], 1)
        losses = F.cross_entropy(logits.mT, labels, reduction="none").sum(1) / (labels >= 0).sum(1)
        state.cache.crop(-(longest - 1))
        tokens: list[list[int]] = []
        while len(tokens) < new:
            chosen = state.logits.argmax(-1)
            tokens.append(chosen.tolist())
            if len(tokens) % CHECK_EVERY == 0 or len(tokens) == new:
                texts = spoken(tokens, prompts, tokenizer, eos_tokens(model))
                if all(done for _, done in texts):
                    break
            state = decode_step(model, chosen, state)
    return [
        {"scores": score(text, p["answers"]), "losses": float(loss), "said": text[:200]}
        for (text, _), p, loss in zip(texts, prompts, losses, strict=True)
    ]


def padded(prompts: Sequence[list[int]], tokenizer: Any) -> list[list[int]]:
    """Bring prompts to one length by line breaks before the shorter ones."""
    (line_break,) = tokenizer("\n", add_special_tokens=False).input_ids
    longest = max(map(len, prompts))
    return [[line_break] * (longest - len(ids)) + ids for ids in prompts]


def spoken(
    tokens: Sequence[Sequence[int]],
    prompts: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    ends: set[int],
) -> list[tuple[str, bool]]:
    """Return the text generated for each prompt so far, and whether its score is final."""
    results = []
    for prompt, generated in zip(prompts, zip(*tokens, strict=True), strict=True):
        generated = [*generated[: prompt["new"]]]
        ended = len(generated) == prompt["new"]
        if stops := [n for n, token in enumerate(generated) if token in ends]:
            generated, ended = generated[: stops[0]], True
        text = tokenizer.decode(generated, skip_special_tokens=True)
        results.append((text, ended or score(text, prompt["answers"]) == 1))
    return results


def score(text: str, answers: Sequence[str]) -> float:
    """RULER's score: the share of the answers that occur in the text, whatever their case."""
    return fmean(answer.lower() in text.lower() for answer in answers)


# the page


def recorded(file: Path) -> list[Measurement]:
    """Return all rows of a file."""
    with Store(":memory:") as store:
        if file.exists():
            store.load(file)
        return [*map(from_row, store.rows())]


def cells(rows: Sequence[Measurement], kind: str, field: str) -> Cells:
    """Return the numbers of one kind by cell and method, signed so that higher is better."""
    table: Cells = {}
    for row in rows:
        if row.key.measure == kind and not row.refused:
            name = f"{row.key.at.get('task') or row.key.at['family']} {row.key.length}"
            sign = -1 if field == "losses" else 1
            numbers = [sign * float(number) for number in row.value[field]]
            table.setdefault(name, {})[row.label] = numbers
    return table


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each number, 1 for the greatest; equal numbers share their mean rank."""
    return [1 + sum(b > a for b in values) + (values.count(a) - 1) / 2 for a in values]


def means(table: Cells, methods: Sequence[str], draw: random.Random | None = None) -> list[float]:
    """Return each method's mean over all cells, as RULER averages its tasks. With a generator, the
    questions of each cell are resampled with replacement."""
    by_cell = []
    for numbers in table.values():
        count = range(len(numbers[methods[0]]))
        chosen = draw.choices(count, k=len(count)) if draw else count
        by_cell.append([fmean(numbers[m][i] for i in chosen) for m in methods])
    return [fmean(column) for column in zip(*by_cell, strict=True)]


def mean_ranks(
    table: Cells, methods: Sequence[str], draw: random.Random | None = None
) -> list[float]:
    """Return each method's mean rank over all cells, negated so that the best is the greatest. A
    cell in which no method answers anything counts as much as any other."""
    by_cell = [ranks(means({name: cell}, methods, draw)) for name, cell in table.items()]
    return [-fmean(column) for column in zip(*by_cell, strict=True)]


def agreement(a: Cells, b: Cells, methods: Sequence[str], by: Any) -> tuple[float, float, float]:
    """Return Spearman's correlation of two orders of methods, with its 95 % bootstrap interval."""

    def once(draw: random.Random | None = None) -> float:
        orders = [ranks(by(table, methods, draw)) for table in (a, b)]
        return correlation(*orders) if all(len({*order}) > 1 for order in orders) else 0.0

    draw = random.Random(0)
    drawn = sorted(once(draw) for _ in range(RESAMPLED))
    return once(), drawn[RESAMPLED // 40], drawn[-1 - RESAMPLED // 40]


def at_lengths(table: Cells, lengths: Sequence[int]) -> Cells:
    return {name: cell for name, cell in table.items() if int(name.split()[-1]) in lengths}


def tables(rows: Sequence[Measurement]) -> str:
    """Return tables of each method's scores, losses and ranks, and of how far the orders agree."""
    if not rows:
        return "Not measured yet.\n"
    lengths = sorted({row.key.length for row in rows if row.key.measure == RULER})
    pairs = {
        name: (cells(rows, RULER, theirs), at_lengths(cells(rows, RETRIEVAL, ours), lengths))
        for name, theirs, ours in (("score", "scores", "exacts"), ("loss", "losses", "losses"))
    }
    all_cells = [cell for both in pairs.values() for table in both for cell in table.values()]
    methods = [label for label in all_cells[0] if all(label in cell for cell in all_cells)]
    return "\n".join([*order_table(pairs, methods), "", *agreement_table(pairs, methods, lengths)])


def order_table(pairs: Mapping[str, tuple[Cells, Cells]], methods: Sequence[str]) -> Iterator[str]:
    """Yield one line per method, the best by RULER's score first."""
    (scores, exacts), (losses, our_losses) = pairs["score"], pairs["loss"]
    tables = (scores, losses, exacts, our_losses)
    by_table = [means(table, methods) for table in tables]
    orders = [ranks(column) for column in by_table]
    yield "| method | RULER score | RULER answer loss | our exact match | our answer loss |"
    yield "| --- | --: | --: | --: | --: |"
    for n in sorted(range(len(methods)), key=lambda n: orders[0][n]):
        row = [column[n] for column in by_table]
        shown = [f"{100 * row[i]:.0f} %" if i % 2 == 0 else f"{-row[i]:.2f}" for i in range(4)]
        places = [f"{text} ({order[n]:g})" for text, order in zip(shown, orders, strict=True)]
        yield f"| `{methods[n]}` | {' | '.join(places)} |"


def agreement_table(
    pairs: Mapping[str, tuple[Cells, Cells]], methods: Sequence[str], lengths: Sequence[int]
) -> Iterator[str]:
    """Yield rank correlations by length, for orders by mean or mean rank."""
    yield "| tokens | of both | by RULER's score and our exact match | by the loss of the answers |"
    yield "| --: | --- | --: | --: |"
    for chosen in dict.fromkeys([*((n,) for n in lengths), tuple(lengths)]):
        for what, by in (("means", means), ("mean ranks", mean_ranks)):
            results = []
            for theirs, ours in pairs.values():
                both = (at_lengths(theirs, chosen), at_lengths(ours, chosen))
                rho, low, high = agreement(*both, methods, by)
                results.append(f"{rho:.2f} (95 % CI {low:.2f} – {high:.2f})")
            yield f"| {' and '.join(f'{n:,}' for n in chosen)} | {what} | {' | '.join(results)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
