"""`longitude.train`, `longitude.lab` and `longitude.tune`: options in, results out.

Under torchrun every process calls the same function; the first process writes files and reports
progress. An interrupted run saves its state and raises `Stopped`; the same call resumes it. A
progress event without a total is a message for the user.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.progress import Event, TextResult
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.eval.records import Score
from longitude.training.data import gather
from longitude.training.distributed import is_first_process, process_group
from longitude.training.lab.compare import compare, make_plan, slug
from longitude.training.lab.run import STOCK, lab_folder, loop_options, make_run, train_run
from longitude.training.loop import SMOOTHED, Step, logger
from longitude.training.options import LabOptions, TrainOptions, TuneOptions
from longitude.training.to_hf import check_dtype, stock_model
from longitude.training.tune.run import Tuned, fine_tune, with_recommendation

if TYPE_CHECKING:
    from rich.console import Console

    from longitude.extension.result import ExtendResult

CHART = "training.png"


@dataclass(frozen=True)
class TrainResult:
    """A trained decoder: its folder, the checkpoint for stock transformers if there is one, and
    the loss of every step."""

    scheme: str
    out: str
    hf: str | None
    losses: tuple[float, ...]
    tokens_per_second: float

    @property
    def loss(self) -> float:
        last = self.losses[-SMOOTHED:]
        return sum(last) / len(last)

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """Return one line for the terminal."""
        stock = f" transformers loads {self.hf}." if self.hf else ""
        return (
            f"{self.out}: loss {self.loss:.3f} after {len(self.losses):,} steps, "
            f"{self.tokens_per_second:,.0f} tokens/s.{stock}"
        )

    def report(self, path: str | Path) -> Path:
        """Write the loss curve (.html, .png, .svg), or the line of `table` (.md)."""
        return _write_loss_curve(self.losses, self.scheme, self.table(), Path(path))

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "out": self.out,
            "hf": self.hf,
            "steps": len(self.losses),
            "loss": self.loss,
            "tokens_per_second": self.tokens_per_second,
        }


def train(scheme: str = "rope()", *, options: TrainOptions = TrainOptions()) -> TrainResult:  # noqa: B008
    """Train one small decoder on bytes, with a position-encoding scheme."""
    parsed = parse(scheme)
    check_dtype(options.weights)
    with process_group(options.device) as world:
        corpus = gather(options.text)
        run = make_run(options, parsed, options.seed, corpus, world)
        folder = lab_folder(Path(options.out or Path("runs") / slug(run)))
        folder.claim(run.to_json(), options.resume)
        if world.first:
            options.progress(Event(stock_model(parsed, options.block)[1], 0, 0))
        if not folder.done:
            loop = loop_options(options, run.config.scheme)
            loop = replace(loop, resume="add --resume to continue")
            kwargs = {"compiled": options.compile, "weights_dtype": options.weights}
            train_run(run, corpus, folder, world, loop, **kwargs)
        history, stock = folder.history(), folder.path / STOCK
    return TrainResult(
        scheme=run.config.scheme,
        out=str(folder.path),
        hf=str(stock) if stock.is_dir() else None,
        losses=tuple(history["losses"]),
        tokens_per_second=history["tokens_per_second"],
    )


@dataclass(frozen=True)
class LabResult(TextResult):
    """Every scheme's score on every task at every length, for each seed."""

    scores: tuple[Score, ...]
    out: str

    def show(self, console: Console) -> None:
        """Print tables and curves."""
        from longitude.viz import lab

        lab.show(self.scores, console)

    def report(self, path: str | Path) -> Path:
        """Write tables and charts (.html, .png, .svg), or the tables (.md)."""
        from longitude.viz import lab

        path = Path(path)
        if path.suffix == ".md":
            path.write_text(lab.markdown(self.scores), encoding="utf-8")
        else:
            lab.write(self.scores, path, "Trained short, tested long")
        return path

    def to_json(self) -> list[dict[str, Any]]:
        """What `--json` prints."""
        return [score.to_json() for score in self.scores]


def lab(schemes: str = "rope(); alibi()", *, options: LabOptions = LabOptions()) -> LabResult:  # noqa: B008
    """Train each of the `;`-separated schemes (or `all`) on the same data; test each at every
    length. Writes rows.sqlite, rows.jsonl, lab.html and a folder for each run into `out`; rows that
    exist are not computed again. Only the first process returns scores."""
    out = Path(options.out)
    with process_group(options.device) as world:
        corpus = gather(options.text)
        plan = make_plan(schemes, options, corpus, world)
        with Store(out / "rows.sqlite") as store:
            result = LabResult(compare(plan, corpus, store, world), str(out))
            if world.first:
                store.export(out / "rows.jsonl")
                result.report(out / "lab.html")
        world.barrier()
    return result


@dataclass(frozen=True)
class TuneResult:
    """A fine-tuned model, and the measurements of baseline, before and after (None: skipped)."""

    tuned: Tuned
    measured: ExtendResult | None = field(default=None, repr=False)

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """Return the table of baseline, before and after, its verdict, and a line on the run."""
        tuned, trained = self.tuned, self.tuned.weights.get("trained", 0) / 1e6
        line = (
            f"{tuned.folder}: {tuned.kind} of {tuned.base} for {tuned.target:,} tokens, loss "
            f"{tuned.loss:.3f} after {tuned.steps:,} steps, {trained:,.1f}M weights trained, "
            f"{tuned.tokens_per_second:,.0f} tokens/s."
        )
        if self.measured is None:
            return line
        return f"{self.measured.table(color=color, width=width)}\n{line}"

    @property
    def files(self) -> list[Path]:
        out = Path(self.tuned.out)
        pages = [out / "report" / name for name in ("report.html", "summary.md")]
        return [*(pages if self.measured else ()), out / CHART]

    def report(self, path: str | Path) -> Path:
        """Write the report of the measurements (.html, .md), or the loss curve if there are none or
        the path is a picture (.png, .svg)."""
        tuned, path = self.tuned, Path(path)
        if self.measured is not None and path.suffix in (".html", ".md"):
            return self.measured.report(path)
        title = f"{Path(tuned.base).name} to {tuned.target:,} tokens: {tuned.scheme}"
        return _write_loss_curve(tuned.losses, title, self.table(), path)

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints; the losses of each step are in training.json."""
        from longitude.training.tune.evaluate import numbers

        measured = self.measured
        return {
            **{name: value for name, value in asdict(self.tuned).items() if name != "losses"},
            "measured": measured and numbers(measured.rows, self.tuned.target),
            "verdict": measured and measured.recommendation["best"],
            "machine": measured and measured.rows[0].value["machine"],
        }


def tune(
    model: str | Path = "tiny-rope",
    *,
    to: str | int | None = None,
    options: TuneOptions = TuneOptions(),  # noqa: B008
) -> TuneResult:
    """Fine-tune a model briefly on longer positions, and measure what that changed. `to` is a
    length (32768, "32k") or a multiple of the trained window ("4x", the default; "8x" for
    tiny-rope). Processes that share each training sequence also share each measured text."""
    from longitude.training.tune.evaluate import evaluate, make_test_set

    model = str(model)
    to = str(to or ("8x" if model == "tiny-rope" else "4x"))
    first, out = is_first_process(), options.folder(model)
    options, note = with_recommendation(model, to, options)
    if note and first:
        options.progress(Event(note, 0, 0))
    test_set = make_test_set(model, to, options) if options.measure else None
    settings = {"model": model, "to": to, **vars(options)}
    del settings["progress"]
    with process_group(options.device) as world, logger(options.report_to, out, settings) as record:

        def report(step: Step) -> None:
            record(step)
            options.progress(step.event(out.name))

        tuned = fine_tune(model, to, options, report)
        measured = evaluate(test_set, tuned, options, world) if test_set else None
    result = TuneResult(tuned, measured)
    if first:
        result.report(out / CHART)
    return result


def _write_loss_curve(losses: tuple[float, ...], title: str, text: str, path: Path) -> Path:
    """Write the loss of every step as a chart, or `text` as Markdown if the path ends in .md."""
    from longitude.viz.files import write_spec
    from longitude.viz.lab import training_spec

    if path.suffix == ".md":
        path.write_text(f"# {title}\n\n```\n{text}\n```\n", encoding="utf-8")
    else:
        write_spec(training_spec(losses, SMOOTHED, title), title, path)
    return path
