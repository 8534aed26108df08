"""`longitude extend`: every way to a longer context, measured on one's own model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.core.store import Store
    from longitude.extension.prepare import Options, Prepared

DEFAULT = "tiny-rope"


To = Annotated[
    str | None,
    typer.Option(
        help="Target length: 32768, 32k, or 4x the trained window. [default: 4x; 8x for tiny-rope]"
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        help="auto, all, or names and schemes joined by ;, as in yarn; leaky_rerope; "
        "rope(remap=rerope(512))."
    ),
]
Docs = Annotated[int, typer.Option(help="Documents to compare on.")]
Lengths = Annotated[
    str | None, typer.Option(help="Lengths to measure at; without, doubling to the target.")
]
Tasks = Annotated[str, typer.Option(help="Questions to ask: passkey, keys, variables; or none.")]
Questions = Annotated[
    int | None,
    typer.Option(help="In each cell of length and depth. [default: 4, and 2 on a CPU]"),
]
Budget = Annotated[
    str | None, typer.Option(help="Time to spend, as in 10m: plans what fits, and says so.")
]
Search = Annotated[
    bool, typer.Option("--search", help="Go on: search parameters around the best methods.")
]
LmEval = Annotated[
    str | None, typer.Option("--lm-eval", help="lm-eval tasks for the best method, as in a,b.")
]
Limit = Annotated[int | None, typer.Option(help="Samples of each lm-eval task; 0 for all of them.")]
Engine = Annotated[str, typer.Option(help="local, or ray: an existing Ray cluster.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Seed = Annotated[int, typer.Option(help="Of documents and questions.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of rows and report. [default: runs/NAME-TARGET]")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and what it would cost; run nothing.")
]


def extend(
    model: o.Model = DEFAULT,
    to: To = None,
    methods: Methods = "auto",
    text: o.Text = None,
    docs: Docs = 4,
    lengths: Lengths = None,
    tasks: Tasks = "passkey",
    questions: Questions = None,
    budget: Budget = None,
    search: Search = False,
    lm_eval: LmEval = None,
    limit: Limit = 50,
    engine: Engine = "local",
    device: Device = "auto",
    dtype: o.ModelDType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    seed: Seed = 0,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: o.Json = False,
) -> None:
    """Measure every way to a longer context on your model, and say which one to use.

    Every method reads the same documents and answers the same questions: loss by position, loss of
    the same last tokens with more and more before them, passkeys by length and depth, what it costs
    inside the trained window, speed and memory. Then one recommendation, and one for each runtime.

    All numbers go to results.sqlite in --out; the same command again goes on where one was
    stopped, and computes nothing twice. The report is one page, report.html.
    """
    from longitude.extension.prepare import Options

    chosen = to or ("8x" if model == DEFAULT else "4x")
    asked = () if tasks == "none" else tuple(t.strip() for t in tasks.split(",") if t.strip())
    options = Options(
        model=model, to=chosen, methods=methods, lengths=_numbers(lengths),
        text=tuple(text or ()), docs=docs, apart=2 * docs if search else 0, tasks=asked,
        questions=questions, seed=seed, device=device, dtype=dtype, revision=revision,
        trust_remote_code=trust_remote_code, quiet=as_json,
    )  # fmt: skip
    _extend(options, budget, search, (lm_eval, limit or None), engine, out, dry_run, as_json)


def _extend(
    options: Options,
    budget: str | None,
    search: bool,
    lm_eval: tuple[str | None, int | None],
    engine: str,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    from longitude.core.store import Store
    from longitude.extension import pipeline as whole

    (tasks, limit), check = lm_eval, whole.engine_named(engine)
    if tasks:
        whole.check_lm_eval()  # before anything takes its time
    prepared = whole.ready(options, budget)
    folder = out or Path("runs") / f"{_slug(options.model)}-{prepared.plan.target}"
    _tell(prepared, folder, as_json)
    if dry_run:
        _show_plan(prepared, as_json)
        return
    with Store(whole.writable(folder) / "results.sqlite") as store:
        _measure(prepared, store, folder, check, as_json)
        extra: dict[str, Any] = {}
        if search:
            extra["search"] = _search(prepared, store, as_json)
        if tasks:
            extra["lm_eval"] = whole.judged_by_lm_eval(prepared, store, tasks, limit)
        _finish(prepared, store, folder, extra, as_json)


def _measure(prepared: Prepared, store: Store, folder: Path, run: Any, as_json: bool) -> None:
    from longitude.cli.output import say
    from longitude.cli.progress import steps
    from longitude.extension.run import missing

    todo = missing(prepared.plan, store)
    every = len(prepared.plan.tasks())
    if len(todo) < every and not as_json:
        say(f"{every - len(todo)} of {every} tasks are recorded in {folder}.")
    with steps(as_json) as tell:
        try:
            run(prepared, store, todo, tell)
        except KeyboardInterrupt:
            say("stopped: the same command goes on from here.")
            raise


def _search(prepared: Prepared, store: Store, as_json: bool) -> list[dict[str, Any]]:
    from longitude.cli.output import say
    from longitude.extension import pipeline as whole

    tell = (lambda text: None) if as_json else say
    return whole.searched(prepared, store, tell)


def _finish(
    prepared: Prepared, store: Store, folder: Path, extra: dict[str, Any], as_json: bool
) -> None:
    from longitude.cli.output import console, print_json, say
    from longitude.extension import pipeline as whole

    found, advice = whole.written(prepared, store, folder, extra)
    if as_json:
        print_json({"folder": str(folder), **advice})
    else:
        whole.show(found, advice, console())
    say(f"wrote {folder / 'report.html'}, summary.md, recommendation.json and rows.jsonl.")


def _tell(prepared: Prepared, folder: Path, as_json: bool) -> None:
    from longitude.cli.output import say

    if as_json:
        return
    plan = prepared.plan
    say(
        f"{plan.subject.name}: trained to {plan.subject.trained:,}, to be read to "
        f"{plan.target:,}: {len(plan.methods)} methods, {len(plan.texts)} documents, "
        f"into {folder}."
    )
    for note in prepared.notes:
        say(f"  {note}")


def _show_plan(prepared: Prepared, as_json: bool) -> None:
    from longitude.cli.output import print_json
    from longitude.extension import pipeline as whole

    told = whole.estimate(prepared)
    if as_json:
        print_json(told)
        return
    for name, value in told.items():
        print(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


def _numbers(text: str | None) -> tuple[int, ...]:
    from longitude.core.validate import UserError

    try:
        return tuple(int(item) for item in text.split(",")) if text else ()
    except ValueError:
        raise UserError(
            f"--lengths takes whole numbers, but got {text!r}: write 512,2048."
        ) from None


def _slug(name: str) -> str:
    """A model's name as a folder's."""
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"
