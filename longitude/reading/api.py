"""The function behind `longitude read`: a question about texts longer than a model's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.progress import Event, TextResult
from longitude.core.validate import UserError, shown
from longitude.options import ReadOptions
from longitude.reading.documents import Document, Piece, documents, most_relevant, pieces
from longitude.reading.select import AUTO, METHODS, Choice, choose, prior_runs, required_extension

if TYPE_CHECKING:
    from rich.console import Console

    from longitude.reading.generate import Answer
    from longitude.reading.llm import LLM
    from longitude.reading.memwalker import Visit, Walk

MAX_WINDOWS = {"nbce": 32, "windows": 8}  # in parallel, many windows drown the relevant one
NBCE_WINDOW = 1024  # tokens, if not given
MIN_WINDOW = 16  # tokens
SEPARATOR = "\n\n"  # between two documents that are read as one text
COUNTED, SAMPLES = 2**20, 16  # characters: longer texts are counted by this many samples
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class ReadResult(TextResult):
    """An answer and where it came from."""

    answer: Answer | Walk
    choice: Choice
    model: str
    question: str
    documents: tuple[Document, ...]
    pieces: tuple[Piece, ...] = ()  # the windows that were read

    @property
    def found(self) -> bool:
        """False if MemWalker found no answer."""
        return getattr(self.answer, "found", True)

    def show(self, console: Console) -> None:
        """Print the answer and its trace."""
        from longitude.viz.text import safe_lines

        console.print(safe_lines(self.answer.text).strip(), markup=False, soft_wrap=True)
        self.show_trace(console)

    def show_trace(self, console: Console) -> None:
        """Print where the answer came from: windows token by token, or the path through a tree."""
        from longitude.viz import reading

        for visit in getattr(self.answer, "path", ()):
            where = place_of(self.documents, visit.start, visit.stop)
            reading.by_path(visit.plain(), where, console)
        if steps := getattr(self.answer, "steps", None):
            wanted = f"{self.question} {self.answer.text}"
            reading.by_windows(steps, self.pieces, wanted, console)

    def to_json(self) -> dict[str, Any]:
        data = self.answer.plain()
        for visit in data.get("path", ()):
            visit["where"] = place_of(self.documents, visit["start"], visit["stop"])
        if "steps" in data:
            data["windows"] = [
                {"document": item.document.name, "where": item.place}
                | {"start": item.start, "stop": item.stop}
                for item in self.pieces
            ]
        files = [{"standard input": "-"}.get(item.name, item.name) for item in self.documents]
        used = {"model": self.model, "question": self.question, "files": files}
        extension = self.choice.extension
        scheme = {"scheme": extension.scheme} if extension else {}
        return {**used, **data, "why": self.choice.why or None, **scheme}


def read(
    paths: str | Path | Sequence[str | Path],
    question: str,
    *,
    options: ReadOptions | None = None,
) -> ReadResult:
    """Answer a question about files that may be longer than the model's window."""
    o = options or ReadOptions()
    _check(question, o)
    texts = documents([str(p) for p in ([paths] if isinstance(paths, (str, Path)) else paths)])
    if o.server:
        from longitude.reading.llm import Server

        choice = Choice("memwalker", "a server gives text, not logits" if o.by == AUTO else "")
        server = Server(o.name, window=o.window, key=o.key)
        answer, parts = _walk(texts, question, server, choice, o), []
    else:
        loaded = _load(question, o)
        choice = _choose(loaded, loaded.count(SEPARATOR.join(item.text for item in texts)), o)
        if choice.by == "memwalker":
            from longitude.reading.llm import Local

            if o.temperature:
                raise UserError("memwalker takes the likeliest tokens: leave --temperature out.")
            llm = Local(loaded.model, loaded.tokenizer, o.window)
            answer, parts = _walk(texts, question, llm, choice, o), []
        else:
            parts = _parts(loaded, texts, question, choice, o)
            answer = _generate(loaded, question, parts, choice, o)
    return ReadResult(answer, choice, o.name, question, tuple(texts), tuple(parts))


def place_of(texts: Sequence[Document], start: int, stop: int) -> str:
    """Describe where characters of the joined text are, by document."""
    places, offset = [], 0
    for document in texts:
        first, last = max(start - offset, 0), min(stop - offset, len(document.text))
        if first < last:
            places.append(f"{document.name}, {document.place(first, last)}")
        offset += len(document.text) + len(SEPARATOR)
    return "; ".join(places)


def _check(question: str, o: ReadOptions) -> None:
    """Raise for errors that can be detected before anything is read or loaded."""
    from longitude.hf.generation import Sampling

    methods = (AUTO, *METHODS)
    if o.by not in methods:
        raise UserError(f"--by is one of {', '.join(methods)}, but got {shown(o.by)}: use {AUTO}.")
    if not question.strip():
        raise UserError("the question is empty: ask something with --question.")
    if question.encode(errors="replace").decode() != question:
        raise UserError(f"the question {shown(question)} is not valid UTF-8: encode it as UTF-8.")
    if o.max_tokens < 1:
        raise UserError(f"--max-tokens is 1 or more, but got {o.max_tokens}: use 64.")
    if o.window is not None and o.window < 1:
        raise UserError(f"--window is 1 token or more, but got {o.window}: leave it out.")
    if o.most_windows is not None and o.most_windows < 0:
        raise UserError(f"--most-windows is 0 (all) or more, but got {o.most_windows}: use 32.")
    Sampling(o.temperature, 1.0, o.seed)
    if o.server and o.by not in (AUTO, "memwalker"):
        raise UserError(
            f"--by {o.by} needs a model's logits, but {shown(o.name)} is a server, which gives "
            f"text: use --by memwalker, or a checkpoint."
        )


# a checkpoint


@dataclass(frozen=True)
class _Loaded:
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any
    prompt: int  # tokens around a window
    trained: int | None
    window: int  # tokens of text that fit beside question and answer

    def count(self, text: str) -> int:
        """Return the tokens of a text; for a very long one, an estimate from samples."""
        from longitude.reading.generate import encode

        if len(text) <= COUNTED:
            return len(encode(self.tokenizer, text))
        starts = range(0, len(text), len(text) // SAMPLES)
        parts = [text[at : at + COUNTED // SAMPLES] for at in starts]
        rate = sum(len(encode(self.tokenizer, p)) for p in parts) / sum(map(len, parts))
        return round(rate * len(text))


def _load(question: str, o: ReadOptions) -> _Loaded:
    """Load the model; raises if it can't answer, or has no room for text."""
    from longitude.hf.loading import load
    from longitude.hf.patch import trained_length
    from longitude.reading.generate import prompt

    if o.model is None:
        o.notify(f"Using the bundled {o.name} (a toy model); pass --model for real answers.")
    model, tokenizer = load(o.name, quiet=True, **o.loading)
    if tokenizer is None:
        raise UserError(f"{o.name} has no tokenizer, so it can't read text: give one that has.")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(
            f"{shown(o.name)} is no causal language model ({type(model).__name__}), so it "
            f"can't answer: give one that writes."
        )
    around, trained = prompt(tokenizer, question).size, trained_length(model)
    room = NBCE_WINDOW if trained is None else trained - around - o.max_tokens
    if room < MIN_WINDOW:
        raise UserError(
            f"the question takes {around} tokens and the answer {o.max_tokens}, which leaves no "
            f"room for text in the model's window of {trained:,}: ask a shorter one, or lower "
            f"--max-tokens."
        )
    if trained is not None and o.window is not None and o.window > room:
        raise UserError(
            f"a window of {o.window:,} tokens with the question ({around}) and the answer "
            f"({o.max_tokens}) is more than the {trained:,} the model was trained on: give "
            f"--window {room} at most."
        )
    return _Loaded(model, tokenizer, around, trained, o.window or room)


def _choose(loaded: _Loaded, tokens: int, o: ReadOptions) -> Choice:
    """Return the method that was given, or the one that `auto` chooses."""
    from longitude.extension.plan import describe
    from longitude.reading.forward import movable

    if o.by not in (AUTO, "extend"):
        return Choice(o.by, "")
    need, trained = tokens + loaded.prompt + o.max_tokens, loaded.trained
    runs = []
    if trained is not None and need > trained:
        runs = prior_runs(Path(o.runs), describe(loaded.model, o.name, o.revision))
    if o.by == AUTO or need <= (trained or 0):
        chats = bool(getattr(loaded.tokenizer, "chat_template", None))
        windows = -(-tokens // loaded.window)
        joins = movable(loaded.model)
        return choose(need, o.max_tokens, windows, trained, chats, runs, joins)
    return Choice("extend", "", required_extension(runs, need, o.name))


def _parts(
    loaded: _Loaded, texts: Sequence[Document], question: str, choice: Choice, o: ReadOptions
) -> list[Piece]:
    """Return the windows to read; of too many, those that BM25 ranks highest."""
    if choice.why:
        o.notify(f"by {choice.by}: {choice.why}.")
    if choice.by == "extend":
        return [Piece(item, 0, len(item.text)) for item in texts]
    window = loaded.window
    if choice.by == "nbce" and o.window is None:
        window = min(window, NBCE_WINDOW)
    parts = [item for item in pieces(texts, window, loaded.count) if item.text.strip()]
    most = MAX_WINDOWS[choice.by] if o.most_windows is None else o.most_windows
    if not most or len(parts) <= most:
        return parts
    o.notify(
        f"{most} of {len(parts):,} windows are read, those with most of the question's words "
        f"(--most-windows 0 reads all)."
    )
    return [parts[n] for n in most_relevant([p.text for p in parts], question, most)]


def _generate(
    loaded: _Loaded, question: str, parts: Sequence[Piece], choice: Choice, o: ReadOptions
) -> Answer:
    """Generate an answer token by token."""
    import torch

    from longitude.eval.perplexity import is_out_of_memory
    from longitude.reading import nbce
    from longitude.reading import windows as parallel
    from longitude.reading.generate import answer_in_one_row

    kwargs: dict[str, Any] = {"max_new_tokens": o.max_tokens, "tell": lambda s: o.on_text(s.text)}
    if o.temperature:
        kwargs |= {"do_sample": True, "temperature": o.temperature}
        if o.seed is not None:
            torch.manual_seed(o.seed)  # transformers samples from the global generator
    windows, by = [piece.text for piece in parts], choice.by
    windows = [SEPARATOR.join(windows)] if by == "extend" else windows
    o.progress(Event("windows", 0, len(windows), job="read"))
    model, tokenizer = loaded.model, loaded.tokenizer
    try:
        if by == "extend":
            scheme = choice.extension.scheme if choice.extension else None
            return answer_in_one_row(model, tokenizer, windows[0], question, scheme, **kwargs)
        if by == "nbce":
            device, free = model.get_input_embeddings().weight.device, 0
            if device.type == "cuda":
                free = torch.cuda.mem_get_info(device)[0]
            elif device.type == "cpu" and MEMORY.is_file():
                lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
                free = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
            kwargs["room"] = free * 3 // 4 or None  # bytes for caches; None if unknown
            return nbce.answer(model, tokenizer, windows, question, **kwargs)
        return parallel.answer(model, tokenizer, windows, question, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "the windows do not fit into memory: lower --window or --most-windows, or use another "
            "device or a smaller dtype."
        ) from error


# a tree


def _walk(
    texts: Sequence[Document], question: str, llm: LLM, choice: Choice, o: ReadOptions
) -> Walk:
    """Answer by a walk through a tree of summaries."""
    from longitude.reading import memwalker

    if choice.why:
        o.notify(f"by {choice.by}: {choice.why}.")

    def tell(visit: Visit) -> None:
        o.on_visit(visit, place_of(texts, visit.start, visit.stop))

    text = SEPARATOR.join(document.text for document in texts)
    try:
        walk = memwalker.read(text, question, llm, folder=o.out, tell=tell, progress=o.progress)
    except KeyboardInterrupt:
        o.notify(f"stopped: summaries are kept in {o.out}, the same command continues.")
        raise
    o.on_text(walk.text)
    return walk
