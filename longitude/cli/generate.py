"""`longitude read` answers a question about texts longer than a model's window; `longitude stream`
lets a model chat, complete or score text for as long as its input lasts."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_json, say
from longitude.core.validate import UserError
from longitude.options import ModelOptions, ReadOptions, ignore
from longitude.viz.text import safe_lines

if TYPE_CHECKING:
    from longitude.hf.generation import Chat
    from longitude.hf.streaming import Stream
    from longitude.reading.memwalker import Visit

BLOCK = 4096  # bytes of standard input that are read at once
MAX_WORD = 256  # characters of the longest word kept in one piece at the end of a block


@o.takes(ReadOptions)
def read(
    options: ReadOptions,
    files: Annotated[
        list[str],
        Argument(metavar="FILE", help="Text, Markdown, HTML or PDF; - is standard input."),
    ],
    question: Annotated[str, Option("--question", "-q", help="What to ask about the text.")],
    *,
    show: Annotated[
        bool, Option("--show", help="Show where the answer came from, token by token.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print the answer and nothing else.")] = False,
    as_json: o.Json = False,
) -> None:
    """Answer a question about a text that is longer than the model's window.

    nbce: every window answers, and at each token the one with the lowest entropy decides. windows:
    the windows stand side by side, and the question attends to all of them. memwalker: a walk
    through a tree of summaries to where the answer is. extend: the full text, under a scheme that
    `longitude extend` has measured.

    The answer goes to stdout as it is generated, everything else to stderr. The exit code is 1 if
    memwalker finds no answer.
    """
    from rich.console import Console

    from longitude.reading import api
    from longitude.viz.reading import by_path

    if quiet and show:
        raise UserError("--quiet is the answer alone, and --show is more: leave one of them out.")
    if "-" in files and not quiet and sys.stdin is not None and sys.stdin.isatty():
        say("reading the text from standard input: end it with Ctrl-D.")
    err = Console(stderr=True, highlight=False, quiet=quiet)

    def notify(message: str) -> None:
        err.print(safe_lines(message), markup=False, soft_wrap=True)

    def on_visit(visit: Visit, where: str) -> None:
        by_path(visit.plain(), where, err)

    with ExitStack() as stack:
        progress = stack.enter_context(display(quiet))
        writer = AnswerWriter(stack.close)  # the progress display must end before output
        options = replace(options, notify=notify, progress=progress)
        if not as_json:
            visited = on_visit if show else ignore
            options = replace(options, on_text=writer.write, on_visit=visited)
        try:
            result = api.read(files, question, options=options)
        finally:
            writer.end()  # also after an error
    if as_json:
        print_json(result.to_json())
    elif show and result.pieces:
        result.show_trace(err)
    if not result.found:
        raise Exit(1)


class AnswerWriter:
    """Writes an answer to stdout as it comes, without what a terminal would interpret."""

    def __init__(self, before: Callable[[], None]) -> None:
        self.before, self.last = before, ""

    def write(self, text: str) -> None:
        """Write a piece; `before` is called first."""
        text = safe_lines(text) if self.last else safe_lines(text).lstrip()
        if text:
            self.before()
            print(text, end="", flush=True)
            self.last = text[-1]

    def end(self) -> None:
        """End the last line."""
        if self.last not in ("", "\n"):
            print(flush=True)


@o.takes(ModelOptions)
def stream(
    options: ModelOptions,
    model: Annotated[
        str, Argument(help="A name on the Hub, a folder, a .gguf file, or tiny-rope.")
    ],
    sinks: Annotated[int, Option(help="First tokens that stay; 0 to see why.")] = 4,
    window: Annotated[int, Option(help="Last tokens that stay.")] = 1020,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--complete",
            help="Answer each line, or continue all of standard input; by default, chat if the "
            "model has a chat template.",
        ),
    ] = None,
    score: Annotated[
        bool, Option("--score", help="Write no text: print the loss of the input.")
    ] = False,
    max_new_tokens: Annotated[int, Option(help="Of one answer; 0: until the model ends it.")] = 256,
    temperature: Annotated[float, Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[
        float, Option(help="Nucleus sampling: draw from the top tokens of this sum.")
    ] = 1.0,
    seed: Annotated[int | None, Option(help="Of the sampling.")] = None,
    chunk: Annotated[int, Option(help="Tokens per forward.")] = 512,
    *,
    as_json: Annotated[bool, Option("--json", help="A line of data for each turn.")] = False,
) -> None:
    """Chat with a model, or let it continue a text, for as long as standard input lasts.

    Only the first few tokens (sinks) and a window of the last ones stay in memory, as in
    StreamingLLM, so the model never runs out of memory or positions; what has left the window is
    forgotten. Sinks and window together may be as long as the trained window. Ctrl-C ends it.
    """
    from longitude.hf import loading, streaming
    from longitude.hf.generation import Chat, Sampling

    streaming.check(sinks, window)  # errors come before a download
    sampling = asdict(Sampling(temperature, top_p, seed))
    if chunk < 1 or max_new_tokens < 0:
        raise UserError(
            f"--chunk is 1 or more and --max-new-tokens 0 or more, but got {chunk} and "
            f"{max_new_tokens}: leave them out."
        )
    if score and chat:
        raise UserError("--score reads a text and answers nothing, but got --chat: leave one out.")
    loaded, tokenizer = loading.load(model, **options.loading)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer, so it can't read text: give one that has.")
    chats = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    turns = Chat(tokenizer) if chats and not score else None
    with streaming.stream(loaded, tokenizer, sinks=sinks, window=window) as opened:
        session = Session(opened, chunk, max_new_tokens or None, sampling, as_json)
        try:
            session.run(turns, score)
        except KeyboardInterrupt:
            session.report("stopped: ")
            raise Exit(130) from None
        session.report()


@dataclass
class Session:
    """A stream on standard input and output, with a status line on stderr."""

    stream: Stream
    chunk: int
    max_new_tokens: int | None
    sampling: dict[str, Any]
    as_json: bool
    turn: int = 0
    begun: float = field(default_factory=time.monotonic)

    def run(self, chat: Chat | None, score: bool) -> None:
        """Answer each line, or print the loss of all text read, or continue that text."""
        if chat is not None:
            return self._chat(chat)
        with self._status() as update:
            total, count = 0.0, 0
            for text in words(iter(lambda: sys.stdin.buffer.read1(BLOCK), b"")):  # type: ignore[attr-defined]
                if not score:
                    self.stream.feed(text, self.chunk)
                else:
                    losses = self.stream.score(text, self.chunk).double()
                    total, count = total + float(losses.sum()), count + len(losses)
                    loss, mean = float(losses.mean()), total / max(1, count)
                    if len(losses) and self.as_json:
                        self._print_row({"loss": loss, "mean": mean})
                    elif len(losses):
                        figures = f"loss {loss:.4f}  mean {mean:.4f}"
                        print(f"{self.stream.tokens:>10,} tokens  {figures}", flush=True)
                update()
        if score and not count:
            raise UserError(
                f"--score needs two tokens or more, for the first has no loss, but standard input "
                f"had {self.stream.tokens}: give more."
            )
        if score:
            return
        if not self.stream.tokens:
            raise UserError("standard input was empty: give a text to go on from.")
        self._generate()

    def _chat(self, chat: Chat) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        while True:
            if console.is_terminal and sys.stdin.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.buffer.readline()
            if not line:
                return
            if message := line.decode(errors="replace").strip():
                with self._status():
                    text = self.stream.encode(chat.next(message), begins=False)
                    self.stream.feed(text, self.chunk)
                self._generate()
                if console.is_terminal:
                    console.print(self._line(), style="dim", markup=False)

    def _generate(self) -> None:
        """Print one answer or completion."""
        begun, pieces = self.stream.tokens, []
        self.turn += 1
        for piece in self.stream.generate(self.max_new_tokens, **self.sampling):
            pieces.append(piece)
            if not self.as_json:
                print(piece, end="", flush=True)
        if not self.as_json:
            return print(flush=True)
        new = {"new_tokens": self.stream.tokens - begun}
        self._print_row({"turn": self.turn, "text": "".join(pieces), **new})

    def _print_row(self, row: dict[str, Any]) -> None:
        s = self.stream
        row |= {"tokens": s.tokens, "tokens_per_second": round(s.rate, 2), "memory": s.memory}
        print(json.dumps(row, ensure_ascii=False, allow_nan=False), flush=True)

    @contextmanager
    def _status(self) -> Iterator[Any]:
        """Show a status line on stderr while the stream reads, if it is a terminal."""
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            yield lambda: None
            return
        # printed lines go above the status line only if both are on the same terminal
        above = sys.stdout.isatty()
        streams = {"redirect_stdout": above, "redirect_stderr": False}
        with Live(self._line(), console=console, transient=True, **streams) as live:
            yield lambda: live.update(self._line())

    def report(self, how: str = "") -> None:
        """Print tokens, speed and memory on stderr."""
        say(f"{how}{self._line()}, {time.monotonic() - self.begun:,.1f} s in all.")

    def _line(self) -> str:
        s = self.stream
        return f"{s.tokens:,} tokens, {s.rate:,.1f} tokens/s, {s.memory / 2**20:,.1f} MiB kept"


def words(blocks: Iterable[bytes]) -> Iterator[str]:
    """Split a text between words as it arrives, since half a word would be other tokens."""
    decoder, pending = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for block in blocks:
        pending += decoder.decode(block)
        end = max(pending.rfind("\n") + 1, pending.rfind(" "))
        end = end if len(pending) - end < MAX_WORD else len(pending)
        if end > 0:  # the space goes with the word after it, as tokenizers have it
            yield pending[:end]
            pending = pending[end:]
    if pending := pending + decoder.decode(b"", final=True):
        yield pending
