"""The page of texts past the window, read off the rows that this script measures.

python docs/scripts/read.py                                     writes the tables
python docs/scripts/read.py --check                             fails when they are stale
python docs/scripts/read.py tiny-rope                           measures: 50 keys per cell
python docs/scripts/read.py MODEL.gguf --lengths 8192 --keys 2  measures: texts of so many tokens

A key that was asked for stays asked, so a measurement can be stopped and run again.
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
OVERLAP = 70  # bytes: more than the sentences with the key take, so that one window has them all
PIECE = 2048  # tokens of a larger model's windows
SCHEMES = {  # the two best of smollm2.md: by loss, and by what it recommends
    "extend": "rope(remap=leaky_rerope(4096, 8))",
    "extend, rerope": "rope(remap=rerope(4096))",
}
Trial = tuple[dict[str, Any], Callable[[], tuple[Any, str]]]  # what it is, and how to ask it


def main(arguments: Sequence[str]) -> None:
    """Measure, or write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lengths", default="8192,16384,32768")
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=["nbce", "windows", *SCHEMES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where measured rows are kept")
    given = parser.parse_args(arguments)
    if given.model:
        measure(given)
        return
    old = PAGE.read_text(encoding="utf-8")
    new = old
    for name, table in (("tiny", tiny_table()), ("long", long_table())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        new = between.sub(lambda _, table=table: f"\n{table}\n", new)
    if given.check and new != old:
        sys.exit(f"{PAGE.name}'s tables are not those of its rows: run docs/scripts/read.py.")
    PAGE.write_text(new, encoding="utf-8")


# measuring


def measure(given: argparse.Namespace) -> None:
    """Ask every key that was not asked yet; what is known is written after each."""
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
            begun = time.perf_counter()
            with peak_memory(model) as peak:
                passkey, said = ask()
            seconds = time.perf_counter() - begun
            found = retrieved(passkey, said)
            value = {"found": found, "said": said, "seconds": round(seconds, 2), "peak": peak()}
            store.put(key, value)
            store.export(given.rows)
            print(key, value, passkey.key, flush=True)


def trials(given: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[Trial]:
    """All that is to be asked of a model, cheapest first."""
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
    """A key in a text of so many windows, each with question and answer as long as the model's."""
    from longitude.eval.tasks.passkey import QUESTION, passkey
    from longitude.reading import extend, nbce, windows

    asked = len(f"\n{QUESTION}")
    wide = 256 - asked - NEW
    step = wide - OVERLAP
    made = passkey(
        key["windows"] * step + OVERLAP + asked + 2,
        rng=key["seed"],
        form="short",
        # alone: so far back that the window does not reach it
        depth=0.0 if key["way"] == "alone" else None,
    )
    text = made.prompt[:-asked]
    if key["way"] == "alone":
        return made, extend.answer(model, tokenizer, text, QUESTION, max_new_tokens=NEW).text
    parts = [text[first : first + wide] for first in range(0, len(text) - OVERLAP, step)]
    way = {"nbce": nbce, "windows": windows}[key["way"]]
    return made, way.answer(model, tokenizer, parts, QUESTION, max_new_tokens=NEW).text


def ask_long(model: Any, tokenizer: Any, key: dict[str, Any]) -> tuple[Any, str]:
    """A key in a text of so many tokens, cut as `longitude read` cuts it."""
    from longitude.eval.tasks.passkey import QUESTION, passkey
    from longitude.reading import extend, nbce, windows
    from longitude.reading.documents import Document, pieces

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    made = passkey(key["length"], rng=key["seed"], count=count)
    text, options = made.prompt[: -len(f"\n{QUESTION}")], {"chat": False, "max_new_tokens": 8}
    if scheme := SCHEMES.get(key["way"]):
        return made, extend.answer(model, tokenizer, text, QUESTION, scheme, **options).text
    parts = [piece.text for piece in pieces([Document("text", text)], PIECE, count)]
    way = {"nbce": nbce, "windows": windows}[key["way"]]
    return made, way.answer(model, tokenizer, parts, QUESTION, **options).text


# the page


def tiny_table() -> str:
    """Keys found, by way and number of windows."""
    cells: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for key, value in rows():
        if key["model"] == TINY:
            cells[key["way"], key["windows"]].append(value["found"])
    lines = [f"| way | {' | '.join(f'{n} windows' for n in WINDOWS)} |"]
    lines += ["| --- |" + " --: |" * len(WINDOWS)]
    for way in ("nbce", "windows", "alone"):
        told = [cells[way, n] for n in WINDOWS]
        lines += [f"| {way} | {' | '.join(f'{sum(c)} of {len(c)}' for c in told)} |"]
    return "\n".join(lines) + "\n"


def long_table() -> str:
    """Keys found, seconds and memory, by way and length."""
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
    """All that was measured."""
    with Store(":memory:") as store:
        store.load(ROWS)
        return [(row.key, row.value) for row in store.rows()]


if __name__ == "__main__":
    main(sys.argv[1:])
