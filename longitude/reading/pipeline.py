"""What `longitude read` does: the text in, a way chosen, an answer out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from longitude.cli.read_progress import Following
from longitude.core.validate import UserError
from longitude.reading.chunks import Piece, pieces
from longitude.reading.documents import STDIN, Document, documents
from longitude.reading.load import LARGE, Loaded, chosen, load_reader, room, tokens_of, window
from longitude.reading.options import Asked, check
from longitude.reading.select import AUTO, Choice
from longitude.viz.reading import Place

if TYPE_CHECKING:
    from longitude.reading.answer import Answer
    from longitude.reading.llm import Speaker
    from longitude.reading.memwalker import Visit

MOST = {"nbce": 32, "windows": 8}  # side by side, many windows drown the one that tells
JOINT = "\n\n"  # between two documents that are read as one text


def answer(asked: Asked) -> None:
    """Read, answer, and show where the answer came from."""
    check(asked)
    asks = STDIN in asked.files and sys.stdin is not None and sys.stdin.isatty()
    if asks and not asked.silent:
        print("reading the text from standard input: end it with Ctrl-D.", file=sys.stderr)
    found = documents(asked.files)
    writes, shows = not asked.as_json, asked.show and not asked.as_json
    with Following(silent=asked.silent, shows=shows, writes=writes) as following:
        if asked.server:
            _walked(asked, found, _server(asked), following, _only_walked(asked))
        else:
            _with_model(asked, found, following)


# a server


def _only_walked(asked: Asked) -> Choice:
    return Choice("memwalker", "a server is only talked to" if asked.by == AUTO else "")


def _server(asked: Asked) -> Speaker:
    from longitude.reading.server import Server

    return Server(asked.name, window=asked.window, key=asked.key)


# a checkpoint


def _with_model(asked: Asked, found: list[Document], following: Following) -> None:
    loaded = load_reader(asked)
    full = window(asked, loaded)
    whole = JOINT.join(one.text for one in found)
    with following.cutting():
        choice = chosen(asked, loaded, tokens_of(whole, loaded.count), full)
    if choice.by == "memwalker":
        from longitude.reading.llm import Local

        if asked.temperature:
            raise UserError("memwalker asks for the likeliest words: leave --temperature out.")
        speaker = Local(loaded.model, loaded.tokenizer, asked.window)
        _walked(asked, found, speaker, following, choice)
        return
    following.chosen(choice)
    if choice.by == "extend":
        cut = [Piece(one, 0, len(one.text)) for one in found]
        _by_token(asked, loaded, following, choice, [whole], cut)
    else:
        size = min(full, LARGE) if choice.by == "nbce" and asked.window is None else full
        with following.cutting():
            every = [one for one in pieces(found, size, loaded.count) if one.text.strip()]
            most = MOST[choice.by] if asked.most_windows is None else asked.most_windows
            cut = _telling(every, asked.question, most, following)
        _by_token(asked, loaded, following, choice, [one.text for one in cut], cut)


def _telling(cut: list[Piece], question: str, most: int, following: Following) -> list[Piece]:
    """The windows that are read: all of them, or those that have to do with the question."""
    from longitude.reading.bm25 import most_telling

    if not most or len(cut) <= most:
        return cut
    following.say(
        f"{most} of {len(cut):,} windows are read, those that have most of the question's words "
        f"(--most-windows 0 reads all)."
    )
    return [cut[n] for n in most_telling([piece.text for piece in cut], question, most)]


def _by_token(
    asked: Asked,
    loaded: Loaded,
    following: Following,
    choice: Choice,
    windows: list[str],
    cut: Sequence[Piece],
) -> None:
    """An answer token by token; `cut` says where the windows stand."""
    options: dict[str, Any] = {"max_new_tokens": asked.max_tokens, "tell": following.step}
    options |= {"room": room(loaded)} if choice.by == "nbce" else {}
    if asked.temperature:
        options |= {"do_sample": True, "temperature": asked.temperature}
        _seeded(asked.seed)
    with following.reading(len(windows)), _in_memory():
        made = _way(choice, windows)(loaded.model, loaded.tokenizer, asked.question, options)
    following.end()
    if asked.as_json:
        _print(asked, choice, made.plain() | {"windows": [*map(_listed, cut)]})
    elif asked.show:
        wanted = f"{asked.question} {made.text}"
        following.show_windows(made.steps, [_seen(one, wanted) for one in cut])


def _seen(piece: Piece, wanted: str) -> Place:
    """A window as a reader knows it again."""
    from longitude.reading.bm25 import telling_part

    return Place(piece.document.name, piece.place, telling_part(piece.text, wanted))


def _listed(piece: Piece) -> dict[str, Any]:
    """A window as JSON has it."""
    span = {"start": piece.first, "stop": piece.past}
    return {"document": piece.document.name, "where": piece.place, **span}


@contextmanager
def _in_memory() -> Iterator[None]:
    from longitude.eval.perplexity import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "the windows do not fit into memory: lower --window or --most-windows, or use another "
            "device or a smaller dtype."
        ) from error


def _way(choice: Choice, windows: list[str]) -> Callable[[Any, Any, str, dict[str, Any]], Answer]:
    from longitude.reading import extend, nbce
    from longitude.reading import windows as parallel

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
    """An answer at the end of a walk; the exit code is 1 if there is none."""
    from longitude.reading import memwalker
    from longitude.reading.tree import Built

    following.chosen(choice)
    text = JOINT.join(one.text for one in found)

    def tell(news: Built | Visit) -> None:
        if isinstance(news, Built):
            following.built(news)
        else:
            following.visited(news, _place(found, news.start, news.stop))

    try:
        with following.walking():
            made = memwalker.read(text, asked.question, speaker, folder=asked.out, tell=tell)
    except KeyboardInterrupt:
        following.say(f"stopped: summaries are kept in {asked.out}, the same command goes on.")
        raise
    following.write(made.text)
    following.end()
    if asked.as_json:
        told = made.plain()
        for visit in told["path"]:
            visit["where"] = _place(found, visit["start"], visit["stop"])
        _print(asked, choice, told)
    if not made.found:
        raise typer.Exit(1)


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

    used = {"model": asked.name, "question": asked.question, "files": list(asked.files)}
    scheme = {"scheme": choice.extension.scheme} if choice.extension else {}
    print_json({**used, **told, "why": choice.why or None, **scheme})
