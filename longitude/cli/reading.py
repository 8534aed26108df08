"""What `longitude read` does: the text in, a way chosen, an answer out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.cli.following import Following
from longitude.fields import Mistake, shown
from longitude.read.auto import AUTO, Case, Choice, choose, extension_for, known
from longitude.read.pieces import Count, Piece, pieces
from longitude.read.text import STDIN, Document, documents

if TYPE_CHECKING:
    from longitude.read.answer import Answer
    from longitude.read.measured import Extension
    from longitude.read.speaker import Speaker

JOINT = "\n\n"  # between two documents that are read as one text
EXACT, SAMPLES = 2**20, 16  # characters that are counted token by token, and samples of more
LARGE = 1024  # tokens of a window where naive Bayes has the choice
LEAST = 16  # tokens of a window that says something


@dataclass(frozen=True)
class Asked:
    """The options, as they were given."""

    files: tuple[str, ...]
    question: str
    model: str
    by: str
    show: bool
    max_tokens: int
    temperature: float
    seed: int | None
    window: int | None
    most_windows: int
    runs: Path
    out: Path
    key: str | None
    quiet: bool
    as_json: bool
    load: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server(self) -> bool:
        """Whether the model is behind a server."""
        return self.model.startswith(("http://", "https://"))

    @property
    def silent(self) -> bool:
        """Whether nothing but the answer, or data, is to be said."""
        return self.quiet or self.as_json


def answer(asked: Asked) -> None:
    """Read, answer, and show where the answer came from."""
    check(asked)
    if STDIN in asked.files and sys.stdin.isatty() and not asked.silent:
        print("reading the text from standard input: end it with Ctrl-D.", file=sys.stderr)
    found = documents(asked.files)
    with Following(asked.silent, asked.as_json) as following:
        if asked.server:
            _walked(asked, found, _server(asked), following, _only_walked(asked))
        else:
            _with_model(asked, found, following)


def check(asked: Asked) -> None:
    """Mistakes that can be told before anything is read or loaded."""
    from longitude.hf.streaming.sample import Sampling

    known(asked.by)
    if not asked.question.strip():
        raise Mistake("the question is empty: ask something with --question.")
    if asked.max_tokens < 1:
        raise Mistake(f"--max-tokens is 1 or more, but got {asked.max_tokens}: use 64.")
    if asked.window is not None and asked.window < 1:
        raise Mistake(f"--window is 1 token or more, but got {asked.window}: leave it out.")
    if asked.most_windows < 0:
        raise Mistake(f"--most-windows is 0 (all) or more, but got {asked.most_windows}: use 32.")
    Sampling(asked.temperature, 1.0, asked.seed)
    if asked.server and asked.by not in (AUTO, "memwalker"):
        raise Mistake(
            f"a server is only talked to, so it can't be read with by {asked.by}: use --by "
            f"memwalker, or a checkpoint."
        )


# a server


def _only_walked(asked: Asked) -> Choice:
    return Choice("memwalker", "a server is only talked to" if asked.by == AUTO else "")


def _server(asked: Asked) -> Speaker:
    from longitude.read.server import Server

    return Server(asked.model, window=asked.window, key=asked.key)


# a checkpoint


@dataclass(frozen=True)
class _Loaded:
    """A model with its tokenizer, and how many tokens its prompts take."""

    model: Any
    tokenizer: Any
    around: int
    trained: int | None

    def count(self, text: str) -> int:
        from longitude.read.prompt import spelled

        return len(spelled(self.tokenizer, text))

    @property
    def chats(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


def _with_model(asked: Asked, found: list[Document], following: Following) -> None:
    loaded = _loaded(asked)
    full = _window(asked, loaded)
    whole = JOINT.join(one.text for one in found)
    choice = _chosen(asked, loaded, _tokens(whole, loaded.count), full)
    if choice.by == "memwalker":
        from longitude.read.speaker import Local

        if asked.temperature:
            raise Mistake("memwalker asks for the likeliest words: leave --temperature out.")
        speaker = Local(loaded.model, loaded.tokenizer)
        _walked(asked, found, speaker, following, choice)
        return
    following.chosen(choice)
    if choice.by == "extend":
        cut = [Piece(Document(", ".join(one.name for one in found), whole), 0, len(whole))]
    else:
        size = min(full, LARGE) if choice.by == "nbce" and asked.window is None else full
        cut = _telling(asked, [*pieces(found, size, loaded.count)], following)
    _by_windows(asked, loaded, following, choice, cut)


def _tokens(text: str, count: Count) -> int:
    """How many tokens a text has; of a very long one about how many, by its parts."""
    if len(text) <= EXACT:
        return count(text)
    every = range(0, len(text), len(text) // SAMPLES)
    parts = [text[at : at + EXACT // SAMPLES] for at in every]
    return round(sum(map(count, parts)) / sum(map(len, parts)) * len(text))


def _loaded(asked: Asked) -> _Loaded:
    from longitude.hf.load import load
    from longitude.hf.patch import trained_length
    from longitude.read.prompt import prompt

    model, tokenizer = load(asked.model, quiet=asked.silent, **asked.load)
    if tokenizer is None:
        raise Mistake(f"{asked.model} has no tokenizer, so it can't read text: give one that has.")
    causal = not getattr(model.config, "is_encoder_decoder", False)
    if not causal or model.get_output_embeddings() is None:
        raise Mistake(
            f"{shown(asked.model)} is no causal language model ({type(model).__name__}), so it "
            f"can't answer: give one that writes."
        )
    around = prompt(tokenizer, asked.question).around
    return _Loaded(model, tokenizer, around, trained_length(model))


def _window(asked: Asked, loaded: _Loaded) -> int:
    """Tokens of text that stand beside the question and the answer; raises where none can."""
    if loaded.trained is None:
        return asked.window or LARGE
    room = loaded.trained - loaded.around - asked.max_tokens
    if room < LEAST:
        raise Mistake(
            f"the question takes {loaded.around} tokens and the answer {asked.max_tokens}, which "
            f"leaves no room for text in the model's window of {loaded.trained:,}: ask a shorter "
            f"one, or lower --max-tokens."
        )
    if asked.window is not None and asked.window > room:
        raise Mistake(
            f"a window of {asked.window:,} tokens with the question ({loaded.around}) and the "
            f"answer ({asked.max_tokens}) is more than the {loaded.trained:,} the model was "
            f"trained on: give --window {room} at most."
        )
    return asked.window or room


def _chosen(asked: Asked, loaded: _Loaded, tokens: int, full: int) -> Choice:
    """The way that was asked for, or the one that suits."""
    if asked.by not in (AUTO, "extend"):
        return Choice(asked.by, "")
    need = tokens + loaded.around + asked.max_tokens
    windows = -(-tokens // full)
    case = Case(need, asked.max_tokens, windows, loaded.trained, loaded.chats)
    if loaded.trained is not None and need > loaded.trained:
        case = replace(case, extensions=_extensions(asked, loaded))
    if asked.by == AUTO or need <= (loaded.trained or 0):
        return choose(case)
    return Choice("extend", "", extension_for(case, asked.model))


def _extensions(asked: Asked, loaded: _Loaded) -> list[Extension]:
    from longitude.extend.subject import subject
    from longitude.read.measured import extensions

    return extensions(asked.runs, subject(loaded.model, asked.model, asked.load["revision"]))


def _telling(asked: Asked, cut: list[Piece], following: Following) -> list[Piece]:
    """The windows that are read: all of them, or those that have to do with the question."""
    from longitude.read.rank import most_telling

    if not asked.most_windows or len(cut) <= asked.most_windows:
        return cut
    following.say(
        f"{asked.most_windows} of {len(cut):,} windows are read, those that have most of the "
        f"question's words (--most-windows 0 reads all)."
    )
    kept = most_telling([piece.text for piece in cut], asked.question, asked.most_windows)
    return [cut[n] for n in kept]


def _by_windows(
    asked: Asked, loaded: _Loaded, following: Following, choice: Choice, cut: Sequence[Piece]
) -> None:
    """An answer token by token."""
    way = _way(choice, [piece.text for piece in cut])
    options: dict[str, Any] = {"max_new_tokens": asked.max_tokens, "tell": following.step}
    if asked.temperature:
        options |= {"do_sample": True, "temperature": asked.temperature}
        _seeded(asked.seed)
    with following.reading(len(cut)):
        made = way(loaded.model, loaded.tokenizer, asked.question, options)
    following.end()
    places = [{"document": p.document.name, "where": p.place} for p in cut]
    spans = [{"start": p.first, "stop": p.past} for p in cut]
    if asked.as_json:
        listed = [place | span for place, span in zip(places, spans, strict=True)]
        _print(asked, choice, made.plain() | {"windows": listed})
    elif asked.show:
        following.show_windows(made.steps, places, [p.text[:80] for p in cut])


def _way(choice: Choice, windows: list[str]) -> Callable[[Any, Any, str, dict[str, Any]], Answer]:
    from longitude.read import extend, nbce
    from longitude.read import windows as parallel

    if choice.by == "extend":
        scheme = choice.extension.scheme if choice.extension else None
        return lambda m, t, q, more: extend.answer(m, t, windows[0], q, scheme, **more)
    by = {"nbce": nbce, "windows": parallel}[choice.by]
    return lambda m, t, q, more: by.answer(m, t, windows, q, **more)


def _seeded(seed: int | None) -> None:
    import torch

    if seed is not None:
        torch.manual_seed(seed)  # transformers draws from the one generator of all


# a tree


def _walked(
    asked: Asked, found: list[Document], speaker: Speaker, following: Following, choice: Choice
) -> None:
    """An answer at the end of a walk."""
    from longitude.read import memwalker

    following.chosen(choice)
    text = JOINT.join(one.text for one in found)
    with following.walking():
        made = memwalker.read(text, asked.question, speaker, folder=asked.out, tell=following.news)
    following.write(made.text)
    following.end()
    places = [_place(found, visit.start, visit.stop) for visit in made.path]
    if asked.as_json:
        told = made.plain()
        for visit, place in zip(told["path"], places, strict=True):
            visit["where"] = place
        _print(asked, choice, told)
    elif asked.show:
        following.show_path([visit.plain() for visit in made.path], places)


def _place(found: Sequence[Document], start: int, stop: int) -> str:
    """Where letters of the joined text stand, by document."""
    told, at = [], 0
    for one in found:
        first, past = max(start - at, 0), min(stop - at, len(one.text))
        if first < past:
            told.append(f"{one.name}, {one.place(first, past)}")
        at += len(one.text) + len(JOINT)
    return "; ".join(told)


def _print(asked: Asked, choice: Choice, told: Mapping[str, Any]) -> None:
    from longitude.cli.output import print_json

    used = {"model": asked.model, "question": asked.question, "files": list(asked.files)}
    scheme = {"scheme": choice.extension.scheme} if choice.extension else {}
    print_json({**used, **told, "why": choice.why or None, **scheme})
