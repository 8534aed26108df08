"""The options of every command, each defined once, as a dataclass field for Python. A field with a
help text is also an option of the command line (`takes` in cli/common.py).

Nothing here imports torch at module level, so that --help answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from longitude.core.client import Retry, is_url
from longitude.core.progress import Progress, silent
from longitude.core.validate import UserError
from longitude.eval.tasks import ALL, families, task_names
from longitude.runtimes import names

DEVICE = "auto, cpu, cuda or mps."
REVISION = "A branch, tag or commit on the Hub."
SERVED = "Tokens to serve: 32768, 32k, 4x. [default: by the scheme's factor]"
TEXT = (
    "A file, a folder or a `datasets` name (owner/name:config:split); as often as you like. "
    "Without: the sources of the standard library and the help topics of this Python."
)
HEADS, DIM = "Heads of a layer.", "Dimensions of a head. [default: 64, or as needed]"


def option(help: str, default: Any = None, flag: str = "", **shown_as: Any) -> Any:
    """Return a dataclass field that is also a command-line option. `flag` replaces the flag derived
    from the field's name; `joined=True` lets one text hold several values, joined by commas."""
    return field(default=default, metadata={"help": help, "flag": flag, **shown_as})


def ignore(*event: Any) -> None:
    """Do nothing with an event."""


class Options:
    """Base class that normalises options from a command or from Python: a single path, name or
    number becomes a tuple, a comma-joined text is split, and a list given for a text is joined."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if get_origin(hints[f.name]) is tuple:
                object.__setattr__(self, f.name, _items(f, hints[f.name], value))
            elif isinstance(value, (list, tuple)):  # schemes have commas of their own
                separator = "; " if f.name in ("methods", "schemes") else ","
                object.__setattr__(self, f.name, separator.join(map(str, value)))


def _items(option: Field[Any], hint: Any, given: Any) -> tuple[Any, ...]:
    """Convert the value of an option to a tuple. Numbers in a text are sorted and deduplicated; in
    a joined text "none" stands for no names."""
    if isinstance(given, str) and hint == tuple[int, ...]:
        try:
            return tuple(sorted({int(item) for item in given.split(",")})) if given else ()
        except ValueError:
            message = f"--{option.name} takes whole numbers, but got {given!r}: write 512,2048."
            raise UserError(message) from None
    if isinstance(given, str) and option.metadata.get("joined"):
        items = [item.strip() for item in given.split(",")]
        return () if items == ["none"] else tuple(filter(None, items))
    if given is None:
        return ()
    values = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in values)


def written(options: Options) -> list[str]:
    """Return the options that differ from their defaults, as command-line arguments."""
    hints, arguments = get_type_hints(type(options)), list[str]()
    for item in fields(options):  # type: ignore[arg-type]
        value, metadata = getattr(options, item.name), item.metadata
        if not metadata or value == item.default:
            continue
        flag = metadata["flag"] or "--" + item.name.replace("_", "-")
        if hints[item.name] == tuple[int, ...] or metadata.get("joined"):
            value = ",".join(map(str, value)) or "none"
        values = value if isinstance(value, tuple) else (value,)
        arguments += [flag] if value is True else [w for item in values for w in (flag, str(item))]
    return arguments


@dataclass(frozen=True)
class ShowOptions(Options):
    """Sizes for `show`."""

    length: int | None = option("Tokens. [default: to fit the scheme]")
    dim: int | None = option(DIM)
    heads: int = option(HEADS, 8)


@dataclass(frozen=True)
class CheckOptions(Options):
    """Sizes for `check`; those that are None follow from the scheme (see `properties.check`)."""

    dim: int | None = option(DIM)
    heads: int = option(HEADS, 8)
    length: int | None = option(
        "Tokens. [default: 4096, or past the lengths that the scheme names]"
    )
    trained: int | None = option("Trained length in tokens. [default: the scheme's, or length / 4]")
    progress: Progress = silent


@dataclass(frozen=True)
class ExploreOptions(Options):
    """What the page shows when it opens."""

    schemes: str | None = option(
        'Up to three methods or schemes: "yarn; leaky_rerope; rope() + logn(4096)".'
    )
    length: int | None = option("Tokens drawn. [default: 4 times the window]")


@dataclass(frozen=True)
class InspectOptions(Options):
    """What to compute besides the configuration's encodings."""

    to: str | int | None = option(
        "A length to reach: 32768, 32k, or 4x the window.", metavar="LENGTH"
    )
    weights: bool = option(
        "Load the weights, and measure scores by distance, heads and sinks.", False
    )
    length: int | None = option("Tokens for --weights. [default: twice the window]")
    text: tuple[str, ...] = option(
        "A file or folder for --weights to read; can be repeated. [default: Python's help topics]",
        (),
    )
    revision: str | None = option(REVISION)


@dataclass(frozen=True)
class ExportOptions(Options):
    """What to write, and where."""

    runtimes: str = option(
        f"{', '.join(names())}; several joined by commas, or all.", "transformers", "--for"
    )
    scheme: str | None = option('Scheme, as in "rope(frequencies=yarn(4, original=8192))".')
    version: str | None = option("Version of the runtime. [default: the newest that is known]")
    to: str | int | None = option(SERVED)
    out: Path | str | None = option(
        "Folder to write. [default: NAME-TARGET if there are files to write; the command of a "
        "single runtime is only printed]"
    )
    weights: str = option("How folders get the weights: link, copy or none.", "link")
    verify: bool = option("Run what is written in the runtimes installed here.", False)
    source: str | None = option("Where to find a run's model, if it was moved.", flag="--model")
    revision: str | None = option(REVISION)
    progress: Progress = silent


@dataclass(frozen=True)
class VerifyOptions(Options):
    """The runtimes to run a model in, and the scheme to compare them with."""

    runtimes: str = option(
        "transformers, vllm, llama.cpp, mlx; several joined by commas, or all.", ALL, "--in"
    )
    scheme: str | None = option(
        "Scheme to write for each runtime before running it. [default: what the model was saved "
        "with, or else its own settings, as they are]"
    )
    to: str | int | None = option(SERVED)
    revision: str | None = option(REVISION)
    progress: Progress = silent


@dataclass(frozen=True)
class LintOptions(Options):
    """The runtimes to check, and the settings they start with besides the model."""

    runtimes: str = option(
        "Runtimes with commas between them, each with a version if wanted, as "
        "vllm,transformers==4.51.3; or all.",
        ALL,
        "--for",
    )
    scheme: str | None = option("The intended scheme. [default: the one in the settings]")
    settings: str | Mapping[str, Any] = option(
        'Settings given at the start, as JSON: {"--hf-overrides": {…}, "--max-model-len": 32768}, '
        '{"-c": 32768, "--rope-scaling": "yarn"}, …',
        "{}",
        "--with",
    )
    revision: str | None = option(REVISION)
    progress: Progress = silent


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """A model's device, dtype and revision, and whether its own code may run."""

    device: str = option(DEVICE, "auto")
    dtype: str = option(
        "auto (the file's own on CUDA; on a CPU float32, or the file's bfloat16 if the CPU has "
        "instructions for it), float32, bfloat16, float16 or float64.",
        "auto",
    )
    revision: str | None = option(REVISION)
    trust_remote_code: bool = option("Run Python code that comes with the model.", False)

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments of `longitude.hf.load`."""
        return {f.name: getattr(self, f.name) for f in fields(ModelOptions)}


@dataclass(frozen=True)
class ExtendOptions(ModelOptions):
    """What `extend` compares, on which texts and at which lengths, and where it runs."""

    methods: str = option(
        "auto, all, or names, the table's labels and schemes joined by ;, as in yarn; "
        "rerope(512); rope(base=500000).",
        "auto",
    )
    lengths: tuple[int, ...] = option("Lengths to measure at. [default: doubled up to --to]", ())
    text: tuple[str, ...] = option(TEXT, ())
    docs: int = option("Documents to compare on.", 4)
    goal: str = option(
        "What the advice is for: context (use a longer one), stream (read on without end in "
        "constant memory) or short (make more of the window).",
        "context",
    )
    tasks: tuple[str, ...] = option(
        f"What to measure, joined by commas: {', '.join(task_names())}; all; none.",
        (ALL,),
        joined=True,
    )
    questions: int | None = option("Prompts of a family at each length in a round. [default: 2]")
    cost: bool = True
    budget: str | None = option("Time to spend, as in 10m: measures what fits, and says so.")
    search: bool = option("Search parameters around the best methods afterwards.", False)
    lm_eval: tuple[str, ...] = option(
        "lm-eval tasks for the best method, as in a,b.", (), joined=True
    )
    limit: int | None = option("Samples of each lm-eval task; 0 for all of them.", 50)
    engine: str = option("local, or ray: an existing Ray cluster.", "local")
    context_parallel: int | None = option(
        "Ranks under torchrun, or GPUs of a Ray cluster, that share the tokens of each text. "
        "[default: the fewest whose memory holds --to]"
    )
    seed: int = option("Random seed for documents and questions.", 0)
    out: Path | str | None = option("Folder of rows and report. [default: runs/NAME-TARGET]")
    tokenizer: Any = None  # if the model is passed already loaded
    progress: Progress = silent


@dataclass(frozen=True)
class ProbeOptions(Options):
    """How far a server is probed, with which questions, and at what cost."""

    to: str | int | None = option(
        "Tokens to probe up to: 131072 or 128k. [default: what the server says]"
    )
    model: str | None = option("The name of the model, where the server has several.")
    reference: str | None = option(
        "The checkpoint that is served, or the folder of a run of `longitude extend`: tells which "
        "scheme is in force.",
        metavar="MODEL|runs/NAME",
    )
    tasks: tuple[str, ...] = option(
        "Families of questions, joined by commas, as in passkey,keys; or all.", (ALL,), joined=True
    )
    questions: int = option("Questions per family, depth and length.", 2)
    budget: str | None = option("Time to spend, as in 5m: measures what fits, and says so.")
    concurrency: int = option("Requests at the same time.", 4)
    runtime: str | None = option("Runtime, if the server does not say: vllm, llama.cpp, ollama, …")
    text: tuple[str, ...] = option(
        "Fill prompts with this file or folder instead: it leaves your machine.", ()
    )
    key: str | None = field(default=None, repr=False)  # never stored
    seed: int = option("Random seed for the questions.", 0)
    device: str = option(DEVICE, "auto")  # that runs the reference
    out: Path | str = option("Folder of answers and report.", Path("runs/probe"))
    retry: Retry = Retry(tries=4, patience=20.0)
    timeout: float = 600.0  # seconds without receiving a byte
    progress: Progress = silent

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(families()) if ALL in self.tasks else self.tasks


@dataclass(frozen=True)
class ReadOptions(ModelOptions):
    """How to read. Events go to callbacks: `on_text` gets the answer as it is generated, `on_visit`
    each step of MemWalker and its place in the text, `notify` messages for the user."""

    model: str | None = option(
        "A name on the Hub, a folder, a .gguf file; or the URL of an OpenAI-compatible server, as "
        "in http://127.0.0.1:8000/v1 or …/v1#NAME. [default: tiny-rope]"
    )
    by: str = option("nbce, windows, memwalker, extend, or auto, which says what it chose.", "auto")
    max_tokens: int = option(
        "Maximum tokens of the answer; above 64, auto may choose memwalker.", 64
    )
    temperature: float = option("Sampling temperature; 0 takes the likeliest token.", 0.0)
    seed: int | None = option("Random seed for sampling.")
    window: int | None = option(
        "Tokens of text in a window; for a server, its context length. [default: what fits]"
    )
    most_windows: int | None = option(
        "Number of windows to read, best word match with the question first; 0: all. [default: 32 "
        "for nbce, 8 for windows]"
    )
    runs: Path | str = option("Folder of `longitude extend` runs, or one of them.", Path("runs"))
    out: Path | str = option(
        "Folder where summaries are kept for the next question (memwalker).", Path("runs/read")
    )
    key: str | None = option(
        "API key, if the server requires one.", envvar="LONGITUDE_API_KEY", metavar="KEY"
    )
    on_text: Callable[[str], None] = ignore
    on_visit: Callable[[Any, str], None] = ignore  # a longitude.reading.memwalker.Visit
    notify: Callable[[str], None] = ignore
    progress: Progress = silent

    @property
    def name(self) -> str:
        return "tiny-rope" if self.model is None else self.model

    @property
    def server(self) -> bool:
        return is_url(self.name)
