"""Latency of one `longitude explore` server while fifty people move its sliders.

Each person drags one slider after another over neighbouring values. During a drag, the page sends a
request when its last answer is drawn, which takes a browser `--draw` seconds, and not within
`--pace` seconds of its last request; then the person looks at the result for a while. The server
is a process of its own; the simulated people, who cost little, run in this one.

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
SETTLES = 10  # seconds after which every server process has finished its imports
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
    quantiles = {f"p{p}": round(1e3 * took[int(len(took) * p / 100)], 1) for p in (50, 90, 95, 99)}
    results = {
        "people": args.people,
        "answers": len(took),
        "answers_a_second": round(len(took) / args.seconds, 1),
        "milliseconds": {**quantiles, "max": round(1e3 * took[-1], 1)},
    }
    print(json.dumps(results, indent=None if args.json else 2))


@contextmanager
def served() -> Iterator[int]:
    """Start a server, warm it up, and yield its port."""
    import socket

    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "longitude", "explore", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(warm(port))
        yield port
    finally:
        server.terminate()
        server.wait()


async def warm(port: int) -> None:
    """Wait until the server answers, and until its slow first answers are done."""
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
    """One person's connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def join(cls, port: int) -> Person:
        return cls(*await asyncio.open_connection(HOST, port, limit=2**22))

    async def ask(self, path: str) -> bytes:
        """Request a path and return the body of the answer, whose status must be 200."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert " 200 " in head.split("\r\n", 1)[0], (path, head)
        size = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
        return await self.reader.readexactly(size)


async def crowd(args: argparse.Namespace, port: int) -> list[float]:
    """Simulate all people; return the seconds of every answer."""
    end = time.perf_counter() + args.seconds
    people = (moving(args, port, random.Random(n), end) for n in range(args.people))
    return [latency for latencies in await asyncio.gather(*people) for latency in latencies]


async def moving(
    args: argparse.Namespace, port: int, rng: random.Random, end: float
) -> list[float]:
    """Simulate one person, who drags and looks until `end`; return the seconds of each answer."""
    person, latencies = await Person.join(port), []
    state = {"method1": rng.choice(METHODS), "method2": rng.choice(METHODS)}
    await asyncio.sleep(rng.uniform(0, args.drag + args.look))
    while time.perf_counter() < end:
        name = rng.choice(list(SLIDERS))
        values, step = SLIDERS[name], rng.choice((-1, 1))
        index, drag_end = rng.randrange(len(values)), time.perf_counter() + args.drag
        while time.perf_counter() < min(drag_end, end):
            index = (index + step) % len(values)
            controls = {**state, name: values[index]}
            sent = time.perf_counter()
            await person.ask(f"/api/draw?{urlencode(controls)}")
            latencies.append(time.perf_counter() - sent)
            await asyncio.sleep(max(args.draw, sent + args.pace - time.perf_counter()))
        state[name] = str(values[index])
        if rng.random() < 0.3:
            state["method1"] = rng.choice(METHODS)
        await asyncio.sleep(rng.uniform(0.5, 1.5) * args.look)
    person.writer.close()
    return latencies


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
