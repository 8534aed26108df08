"""`longitude tune`: a short fine-tune that makes an extension stick."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from longitude.cli import options as o
from longitude.cli import tune_options as t

if TYPE_CHECKING:
    from longitude.training.tune.evaluate import Exam, Paper
    from longitude.training.tune.options import Asked, Step, Tuned

DEFAULT = "tiny-rope"


@dataclass(frozen=True)
class _Wish:
    """What a command line asks for besides the training itself."""

    exam: Exam | None
    report_to: str | None
    quiet: bool
    as_json: bool

    @property
    def speaks(self) -> bool:
        """Whether this process tells how it goes: under torchrun the first one does."""
        return not self.quiet and _first()


def tune(
    model: o.Model = DEFAULT,
    to: t.To = None,
    recipe: t.RecipeName = None,
    scheme: t.SchemeText = None,
    text: o.Text = None,
    test: t.Test = None,
    steps: t.Steps = None,
    batch: t.Batch = None,
    seq: t.Seq = None,
    lr: t.Rate = None,
    warmup: t.Warmup = None,
    positions: t.Policy = None,
    lora: t.Lora = None,
    rank: t.Rank = None,
    out: t.Out = None,
    resume: t.Resume = True,
    save_every: t.SaveEvery = 50,
    checkpointing: t.Checkpointing = None,
    measure: t.Measure = True,
    docs: t.Docs = 4,
    tasks: t.Tasks = "passkey",
    questions: t.Questions = None,
    report_to: t.ReportTo = None,
    device: t.Device = "auto",
    dtype: t.DType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    seed: t.Seed = 0,
    quiet: t.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Train a model a little on longer positions, and measure what that changed.

    A recipe says the scheme, the learning rate, the steps, the sequences, their positions and what
    is trained; any of it can be set. Then the same measurements as `longitude extend` takes, of the
    model as it is, before and after training, in report/report.html. What comes out lies in model/:
    longitude.hf.loading opens it, longitude export writes it for a runtime; an adapter carries its
    scheme with it.

    Stop it at any moment: the same command goes on from the last checkpoint. It runs under
    `torchrun` and `accelerate launch` as well.
    """
    given = {k: v for k, v in locals().items() if k in _AS_ASKED}
    _tune(given, _exam(measure, test, docs, tasks, questions), report_to, quiet, as_json)


_AS_ASKED = (
    *("model", "to", "recipe", "scheme", "text", "steps", "batch", "seq", "lr", "warmup"),
    *("positions", "lora", "rank", "out", "resume", "save_every", "checkpointing", "device"),
    *("dtype", "revision", "trust_remote_code", "seed"),
)


def _exam(
    measure: bool, test: list[str] | None, docs: int, tasks: str, questions: int | None
) -> Exam | None:
    from longitude.training.tune.evaluate import Exam

    if not measure:
        return None
    asked = () if tasks == "none" else tuple(t.strip() for t in tasks.split(",") if t.strip())
    return Exam(tuple(test or ()), docs, asked, questions)


def _asked(given: dict[str, Any], quiet: bool) -> Asked:
    """The question, in the words of the library."""
    from longitude.runtimes.files import slug
    from longitude.training.tune.options import Asked

    model, lora = given.pop("model"), given.pop("lora")
    names = {"batch": "rows", "seq": "length", "lr": "rate"}
    fields = {names.get(key, key): value for key, value in given.items()}
    fields["to"] = fields["to"] or ("8x" if model == DEFAULT else "4x")
    fields["text"] = tuple(fields["text"] or ())
    home = Path("runs") / f"{slug(model)}-{slug(fields['recipe'] or 'tuned')}"
    fields["out"] = str(fields["out"] or home)
    trained = None if lora is None else "lora" if lora else "full"
    return Asked(model=model, trained=trained, quiet=quiet, **fields)


def _tune(
    given: dict[str, Any], exam: Exam | None, report_to: str | None, quiet: bool, as_json: bool
) -> None:
    from longitude.training import loggers as boards
    from longitude.training.tune.evaluate import check_base, set_paper
    from longitude.training.tune.prepare import check
    from longitude.training.tune.prior_run import with_advice

    wish = _Wish(exam, report_to, quiet, as_json)
    boards.check(report_to)
    asked = _asked(given, quiet or as_json)
    check(asked)
    check_base(asked)
    asked, note = with_advice(asked)
    if note and wish.speaks:
        _say(note)
    paper = set_paper(exam, asked) if exam is not None and _first() else None
    tuned = _trained(asked, wish)
    if _first():
        _finish(tuned, asked, paper, wish)


def _trained(asked: Asked, wish: _Wish) -> Tuned:
    from longitude.training.loop import Stopped
    from longitude.training.tune.pipeline import run

    with _told(asked, wish) as tell:
        try:
            return run(asked, tell)
        except Stopped as stop:
            if _first():
                _say(f"stopped after step {stop}: the same command goes on from here.")
            raise typer.Exit(130) from None


@contextmanager
def _told(asked: Asked, wish: _Wish) -> Iterator[Callable[[Step], None]]:
    """Every step, in the terminal and on a board."""
    from dataclasses import asdict

    from longitude.cli.progress import bar
    from longitude.training.loggers import board

    with ExitStack() as stack:
        shown = stack.enter_context(bar(wish.speaks))
        record = stack.enter_context(board(wish.report_to, Path(asked.out), asdict(asked)))
        shown.start(Path(asked.out).name)

        def tell(step: Step) -> None:
            record(step)
            shown.tell(_Pace(step.step, step.steps, step.loss, step.tokens_per_second, step.left))

        yield tell


@dataclass(frozen=True)
class _Pace:
    """A step as a bar shows it."""

    step: int
    steps: int
    loss: float
    rate: float
    left: float


def _finish(tuned: Tuned, asked: Asked, paper: Paper | None, wish: _Wish) -> None:
    from longitude.cli.output import console, print_json
    from longitude.training.tune import report as verdict

    found: list[Any] = []
    told: dict[str, Any] = {}
    if paper is not None:
        found, told = _measured(tuned, asked, paper, wish)
    drawn = verdict.draw(tuned)
    if wish.as_json:
        numbers = verdict.numbers(found, tuned) if found else None
        more = {"measured": numbers, "verdict": told.get("best")}
        more |= {"machine": found[0].value["machine"] if found else None}
        return print_json({**tuned.plain(), **more})
    if found:
        verdict.show(found, told, console())
    weights = tuned.weights.get("trained", 0) / 1e6
    _say(
        f"{tuned.folder}: {tuned.kind} of {tuned.base} for {tuned.target:,} tokens, loss "
        f"{tuned.loss:.3f} after {tuned.steps:,} steps, {weights:,.1f}M weights trained, "
        f"{tuned.tokens_per_second:,.0f} tokens a second."
    )
    pages = f"{Path(tuned.out) / verdict.REPORT / 'report.html'}, summary.md and " if found else ""
    _say(f"wrote {pages}{drawn}.")


def _measured(
    tuned: Tuned, asked: Asked, paper: Paper, wish: _Wish
) -> tuple[list[Any], dict[str, Any]]:
    """The rows of as it is, before and after, and what they say."""
    from longitude.cli.progress import display
    from longitude.core.store import Store
    from longitude.extension.api import writable
    from longitude.training.tune import report as verdict
    from longitude.training.tune.evaluate import sit

    folder = writable(Path(tuned.out) / verdict.REPORT)
    with Store(folder / "results.sqlite") as store, display(not wish.speaks) as tell:
        try:
            found = sit(paper, asked, tuned, store, tell)
        except KeyboardInterrupt:
            _say(f"{tuned.folder} is whole; the same command goes on with its measurements.")
            raise
        return found, verdict.write(found, tuned, store)


def _first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _say(news: str) -> None:
    from longitude.cli.output import say

    say(news)
