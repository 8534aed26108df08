"""`longitude stream`: a model that chats, completes or scores for as long as it is fed."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from longitude.cli.stream_progress import Pace
    from longitude.hf.generation import Chat
    from longitude.hf.streaming import Stream

BLOCK = 4096  # bytes read at once: what is fed between two looks at the pace
WORD = 256  # the longest word that is kept together where two blocks meet

Model = Annotated[
    str, typer.Argument(help="A name on the Hub, a folder, a .gguf file, or tiny-rope.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--complete",
        help="Answer each line, or write on from all of standard input; without, chat if the model "
        "has a chat template.",
    ),
]
Score = Annotated[
    bool, typer.Option("--score", help="Write no text: print the loss of what is fed.")
]
MaxNew = Annotated[int, typer.Option(help="Of one answer; 0: until the model ends it.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest ones of this share.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


def stream(
    model: Model,
    sinks: Annotated[int, typer.Option(help="First tokens that stay; 0 to see why.")] = 4,
    window: Annotated[int, typer.Option(help="Last tokens that stay.")] = 1020,
    chat: Chat = None,
    score: Score = False,
    max_new_tokens: MaxNew = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens read at once.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    trust_remote_code: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of data for each turn.")] = False,
) -> None:
    """Chat with a model, or let it write on, for as long as standard input lasts.

    Only the first few tokens and the last window of them stay in memory, as in StreamingLLM, so
    it never runs out of either memory or positions; what has left the window is forgotten. Sinks
    and window together may be as long as the model was trained to. Ctrl-C ends it.
    """
    from longitude.core.validate import UserError
    from longitude.hf.generation import Sampling, check

    check(sinks, window)  # mistakes come before a download
    draws = asdict(Sampling(temperature, top_p, seed))
    if chunk < 1 or max_new_tokens < 0:
        raise UserError(
            f"--chunk is 1 or more and --max-new-tokens 0 or more, but got {chunk} and "
            f"{max_new_tokens}: leave them out."
        )
    if score and chat:
        raise UserError("--score reads a text and answers nothing, but got --chat: leave one out.")
    where = {"device": device, "dtype": dtype, "revision": revision}
    how = How(sinks, window, chat, score, chunk, max_new_tokens or None, draws, as_json)
    _stream(model, {**where, "trust_remote_code": trust_remote_code}, how)


class How(NamedTuple):
    """What was asked for."""

    sinks: int
    window: int
    chat: bool | None
    score: bool
    chunk: int
    most: int | None
    draws: dict[str, Any]
    as_json: bool


def _stream(name: str, where: dict[str, Any], how: How) -> None:
    from longitude.cli.stream_progress import Pace
    from longitude.core.validate import UserError
    from longitude.hf.generation import Chat
    from longitude.hf.loading import load
    from longitude.hf.streaming import stream as opened

    model, tokenizer = load(name, **where)
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer, so it can't read text: give one that has.")
    chats = bool(getattr(tokenizer, "chat_template", None)) if how.chat is None else how.chat
    turns = Chat(tokenizer) if chats and not how.score else None
    with opened(model, tokenizer, sinks=how.sinks, window=how.window) as s, Pace(s) as pace:
        told = Told(s, pace, how)
        _until_stopped(told, turns, pace)


def _until_stopped(told: Told, turns: Chat | None, pace: Pace) -> None:
    """Do what was asked for; Ctrl-C is a good end too."""
    try:
        if turns is not None:
            told.chat(turns)
        elif told.how.score:
            told.score()
        else:
            told.complete()
    except KeyboardInterrupt:
        pace.end("stopped")
        raise typer.Exit(130) from None
    pace.end()


class Told:
    """What a stream reads and writes, on standard input and output."""

    def __init__(self, stream: Stream, pace: Pace, how: How) -> None:
        self.stream, self.pace, self.how = stream, pace, how
        self.turn = 0

    def chat(self, turns: Chat) -> None:
        """An answer to each line."""
        for line in _lines(self.pace):
            with self.pace.shown():
                text = turns.next(line)
                self.stream.feed(self.stream.encode(text, begins=False), self.how.chunk)
            self._write()
            self.pace.turn()

    def complete(self) -> None:
        """Everything is read; then comes what follows it."""
        from longitude.core.validate import UserError

        with self.pace.shown():
            for text in _words(_standard_input()):
                self.stream.feed(text, self.how.chunk)
                self.pace.tell()
        if not self.stream.tokens:
            raise UserError("standard input was empty: give a text to go on from.")
        self._write()

    def score(self) -> None:
        """The loss of every block, and of all so far."""
        total, count = 0.0, 0
        with self.pace.shown():
            for text in _words(_standard_input()):
                losses = self.stream.score(text, self.how.chunk).double()
                total, count = total + float(losses.sum()), count + len(losses)
                self.pace.tell()
                if len(losses):
                    self._scored(float(losses.mean()), total / count)

    def _scored(self, here: float, mean: float) -> None:
        tokens = self.stream.tokens
        if self.how.as_json:
            return _print_line({"tokens": tokens, "loss": here, "mean": mean, **self._pace()})
        self.pace.above(f"{tokens:>10,} tokens  loss {here:.4f}  mean {mean:.4f}")

    def _write(self) -> None:
        """One answer or completion."""
        begun, said = self.stream.tokens, []
        self.turn += 1
        for piece in self.stream.generate(self.how.most, **self.how.draws):
            said.append(piece)
            if not self.how.as_json:
                print(piece, end="", flush=True)
        if not self.how.as_json:
            return print(flush=True)
        text, made = "".join(said), self.stream.tokens - begun
        _print_line({"turn": self.turn, "text": text, "new_tokens": made, **self._pace()})

    def _pace(self) -> dict[str, float]:
        s = self.stream
        return {"tokens": s.tokens, "tokens_per_second": round(s.rate, 2), "memory": s.memory}


def _print_line(row: dict[str, Any]) -> None:
    print(json.dumps(row, ensure_ascii=False, allow_nan=False), flush=True)


def _lines(pace: Pace) -> Iterator[str]:
    """What is said, line by line; bytes that are no text become question marks."""
    while pace.ask() and (line := sys.stdin.buffer.readline()):
        if said := line.decode(errors="replace").strip():
            yield said


def _standard_input() -> Iterator[bytes]:
    """What has come by now, and what comes then."""
    while block := sys.stdin.buffer.read1(BLOCK):  # type: ignore[attr-defined]
        yield block


def _words(blocks: Iterable[bytes]) -> Iterator[str]:
    """A text as it comes, cut between words: a word in two pieces would be other tokens."""
    decoder, left = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for block in blocks:
        left += decoder.decode(block)
        end = max(left.rfind("\n") + 1, left.rfind(" "))
        end = end if len(left) - end < WORD else len(left)
        if end > 0:  # the space goes with the word after it, as tokenizers have it
            yield left[:end]
            left = left[end:]
    if left := left + decoder.decode(b"", final=True):
        yield left
