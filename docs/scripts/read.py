"""Write the page of texts past the window from the rows that this script measures.

python docs/scripts/read.py                                     writes the tables
python docs/scripts/read.py --check                             fails when they are stale
python docs/scripts/read.py tiny-rope                           measures: 50 keys per cell
python docs/scripts/read.py MODEL.gguf --lengths 8192 --keys 2  measures: texts of so many tokens

Results are stored after each key, so a measurement can be stopped and resumed.
"""

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longitude.core.store import Store

PAGE = Path(__file__).parents[1] / "results" / "read.md"
ROWS = PAGE.with_suffix(".jsonl")
TINY = "tiny-rope"
WINDOWS = (2, 4, 8, 16)
KEYS = 50
NEW = 7  # bytes of tiny-rope's answer: a space, five digits, a full stop
OVERLAP = 70  # bytes: more than the sentences with the key have, so that one window holds them
PIECE = 2048  # tokens of a larger model's windows
SCHEMES = {  # the two best of smollm2.md: by loss, and by its recommendation
    "extend": "rope(remap=leaky_rerope(4096, 8))",
    "extend, rerope": "rope(remap=rerope(4096))",
}
Trial = tuple[dict[str, Any], Callable[[], tuple[Any, str]]]  # its key, and a function that runs it


def main(arguments: Sequence[str]) -> None:
    """Measure a model if one is given, else write the tables or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lengths", default="8192,16384,32768")
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=["nbce", "windows", *SCHEMES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where measured rows are kept")
    args = parser.parse_args(arguments)
    if args.model:
        measure(args)
        return
    old = PAGE.read_text(encoding="utf-8")
    new = old
    for name, table in (("tiny", tiny_table()), ("long", long_table())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        new = between.sub(lambda _, table=table: f"\n{table}\n", new)
    if args.check and new != old:
        sys.exit(f"{PAGE.name}'s tables are not those of its rows: run docs/scripts/read.py.")
    PAGE.write_text(new, encoding="utf-8")


# measuring


def measure(given: argparse.Namespace) -> None:
    """Run every trial that is not recorded yet; rows are written after each."""
    import longitude.hf as lh
    from longitude.eval.tasks.cost import peak_memory
    from longitude.eval.tasks.passkey import retrieved

    dtype = "float32" if given.device == "cpu" else "bfloat16"
    model, tokenizer = lh.load(given.model, device=given.device, dtype=dtype, quiet=True)
    with Store(":memory:") as store:
        if given.rows.exists():
            store.load(given.rows)
        for key, ask in trials(given, model, tokenizer):
            if store.get(key) is not None:
                continue
            start = time.perf_counter()
            with peak_memory(model) as peak:
                passkey, text = ask()
            seconds = time.perf_counter() - start
            found = retrieved(passkey, text)
            value = {"found": found, "said": text, "seconds": round(seconds, 2), "peak": peak()}
            store.put(key, value)
            store.export(given.rows)
            print(key, value, passkey.key, flush=True)


def trials(given: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[Trial]:
    """Yield all trials of a model, cheapest first."""
    if given.model == TINY:
        for count in WINDOWS:
            for seed in range(KEYS):
                for way in ("nbce", "windows", "alone"):
                    key = {"model": TINY, "way": way, "windows": count, "seed": seed}
                    yield key, lambda k=key: ask_tiny(model, tokenizer, k)
        return
    name = Path(given.model).name
    for seed in range(given.keys):
        for length in map(int, given.lengths.split(",")):
            for way in given.ways:
                key = {"model": name, "way": way, "length": length, "seed": seed}
                key |= {"device": given.device}
                yield key, lambda k=key: ask_long(model, tokenizer, k)


def ask_tiny(model: Any, tokenizer: Any, key: dict[str, Any]) -> tuple[Any, str]:
    """Ask for a key in a text of several windows, each the model's less question and answer."""
    from longitude.eval.tasks.passkey import QUESTION, passkey
    from longitude.reading import extend, nbce, windows

    question_bytes = len(f"\n{QUESTION}")
    window = 256 - question_bytes - NEW
    step = window - OVERLAP
    task = passkey(
        key["windows"] * step + OVERLAP + question_bytes + 2,
        rng=key["seed"],
        form="short",
        # alone: at the beginning, where the window does not reach
        depth=0.0 if key["way"] == "alone" else None,
    )
    text = task.prompt[:-question_bytes]
    if key["way"] == "alone":
        return task, extend.answer(model, tokenizer, text, QUESTION, max_new_tokens=NEW).text
    parts = [text[first : first + window] for first in range(0, len(text) - OVERLAP, step)]
    way = {"nbce": nbce, "windows": windows}[key["way"]]
    return task, way.answer(model, tokenizer, parts, QUESTION, max_new_tokens=NEW).text


def ask_long(model: Any, tokenizer: Any, key: dict[str, Any]) -> tuple[Any, str]:
    """Ask for a key in a text of `length` tokens, cut as `longitude read` cuts it."""
    from longitude.eval.tasks.passkey import QUESTION, passkey
    from longitude.reading import extend, nbce, windows
    from longitude.reading.documents import Document, pieces

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    task = passkey(key["length"], rng=key["seed"], count=count)
    text, options = task.prompt[: -len(f"\n{QUESTION}")], {"chat": False, "max_new_tokens": 8}
    if scheme := SCHEMES.get(key["way"]):
        return task, extend.answer(model, tokenizer, text, QUESTION, scheme, **options).text
    parts = [piece.text for piece in pieces([Document("text", text)], PIECE, count)]
    way = {"nbce": nbce, "windows": windows}[key["way"]]
    return task, way.answer(model, tokenizer, parts, QUESTION, **options).text


# the page


def tiny_table() -> str:
    """Return a table of keys found, by method and number of windows."""
    cells: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for key, value in rows():
        if key["model"] == TINY:
            cells[key["way"], key["windows"]].append(value["found"])
    lines = [f"| way | {' | '.join(f'{n} windows' for n in WINDOWS)} |"]
    lines += ["| --- |" + " --: |" * len(WINDOWS)]
    for way in ("nbce", "windows", "alone"):
        columns = [cells[way, n] for n in WINDOWS]
        lines += [f"| {way} | {' | '.join(f'{sum(c)} of {len(c)}' for c in columns)} |"]
    return "\n".join(lines) + "\n"


def long_table() -> str:
    """Return a table of keys found, seconds and memory, by length and method."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for key, value in rows():
        if key["model"] != TINY:
            cells[key["length"], key["way"], key["device"]].append(value)
    lines = ["| tokens | way | keys found | seconds each | peak memory | on |"]
    lines += ["| --: | --- | --: | --: | --: | --- |"]
    for (length, way, device), values in sorted(cells.items(), key=_gpus_first):
        found = sum(value["found"] for value in values)
        seconds = sum(value["seconds"] for value in values) / len(values)
        peak = max(value["peak"] for value in values) / 2**30
        cell = f"{found} of {len(values)} | {seconds:,.3g} | {peak:.2f} GiB | {device}"
        lines += [f"| {length:,} | {way} | {cell} |"]
    return "\n".join(lines) + "\n"


def _gpus_first(cell: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    length, way, device = cell[0]
    return device == "cpu", device, length, way


def rows() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the key and value of every recorded row."""
    with Store(":memory:") as store:
        store.load(ROWS)
        return [(row.key, row.value) for row in store.rows()]


if __name__ == "__main__":
    main(sys.argv[1:])
