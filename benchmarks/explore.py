"""Fifty people moving sliders of one `longitude explore`: how long an answer takes.

Each of them drags one slider after the other over neighbouring values. A page asks anew when its
last answer is drawn, which takes a browser `--draw` seconds, and not within `--pace` seconds of its
last question, for as long as a drag lasts; then the person looks at what came of it. The server is
a process of its own; the people, who cost little, are here.

    python -m benchmarks.explore [--people 50] [--seconds 20] [--drag 1.5] [--look 1.5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlencode

HOST = "127.0.0.1"
SETTLES = 10  # seconds in which every process of the server has imported what it needs
METHODS = ("own", "linear", "ntk", "yarn", "dynamic_ntk", "rerope", "leaky_rerope", "self_extend")
METHODS += ("dual_chunk", "streaming", "alibi_lm", "t5_decoder", "su_rerope", "llama31", "mistral")
WINDOWS = [round(2 ** (6 + 0.5 * n)) for n in range(29)]
LENGTHS = [round(2 ** (6 + 0.25 * n)) for n in range(69)]
BASES = [float(f"{10 ** (2 + 0.05 * n):.3g}") for n in range(141)]
FACTORS = [float(f"{2 ** (0.25 * n):.3g}") for n in range(33)]
SLIDERS = {"window": WINDOWS, "length": LENGTHS, "dim": list(range(16, 257, 16)), "base1": BASES}
SLIDERS |= {"base2": BASES, "factor1": FACTORS, "factor2": FACTORS}


def main() -> None:
    args = options().parse_args()
    with served() as port:
        took = asyncio.run(crowd(args, port))
    took.sort()
    share = {f"p{p}": round(1e3 * took[int(len(took) * p / 100)], 1) for p in (50, 90, 95, 99)}
    found = {
        "people": args.people,
        "answers": len(took),
        "answers_a_second": round(len(took) / args.seconds, 1),
        "milliseconds": {**share, "max": round(1e3 * took[-1], 1)},
    }
    print(json.dumps(found, indent=None if args.json else 2))


@contextmanager
def served() -> Iterator[int]:
    """The port of a server of its own, warm."""
    import socket

    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "longitude", "explore", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(warm(port))
        yield port
    finally:
        server.terminate()
        server.wait()


async def warm(port: int) -> None:
    """Wait until it answers, and until what takes long the first time is done."""
    for _ in range(600):
        try:
            person = await Person.join(port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        for path in ("/", "/vega.js", "/api/draw", "/api/words", "/api/draw?method1=alibi_lm"):
            await person.ask(path)
        await asyncio.sleep(SETTLES)
        return person.writer.close()
    raise SystemExit("longitude explore does not answer")


class Person:
    """One connection, and the controls of one page."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def join(cls, port: int) -> Person:
        return cls(*await asyncio.open_connection(HOST, port, limit=2**22))

    async def ask(self, path: str) -> bytes:
        """An answer, which must be one."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert " 200 " in head.split("\r\n", 1)[0], (path, head)
        size = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
        return await self.reader.readexactly(size)


async def crowd(args: argparse.Namespace, port: int) -> list[float]:
    """The seconds of every answer."""
    end = time.perf_counter() + args.seconds
    each = (moving(args, port, random.Random(n), end) for n in range(args.people))
    return [one for found in await asyncio.gather(*each) for one in found]


async def moving(
    args: argparse.Namespace, port: int, rng: random.Random, end: float
) -> list[float]:
    """One person: drags and looks until the end."""
    person, took = await Person.join(port), []
    state = {"method1": rng.choice(METHODS), "method2": rng.choice(METHODS)}
    await asyncio.sleep(rng.uniform(0, args.drag + args.look))
    while time.perf_counter() < end:
        name = rng.choice(list(SLIDERS))
        values, step = SLIDERS[name], rng.choice((-1, 1))
        at, over = rng.randrange(len(values)), time.perf_counter() + args.drag
        while time.perf_counter() < min(over, end):
            at = (at + step) % len(values)
            said = {**state, name: values[at]}
            asked = time.perf_counter()
            await person.ask(f"/api/draw?{urlencode(said)}")
            took.append(time.perf_counter() - asked)
            await asyncio.sleep(max(args.draw, asked + args.pace - time.perf_counter()))
        state[name] = str(values[at])
        if rng.random() < 0.3:
            state["method1"] = rng.choice(METHODS)
        await asyncio.sleep(rng.uniform(0.5, 1.5) * args.look)
    person.writer.close()
    return took


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--drag", type=float, default=1.5, help="seconds of one drag")
    parser.add_argument("--look", type=float, default=1.5, help="seconds between drags")
    parser.add_argument("--draw", type=float, default=0.08, help="seconds of drawing an answer")
    parser.add_argument("--pace", type=float, default=0.12, help="seconds between two questions")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
