"""The page served: on the loopback address, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from threading import Thread, Timer
from time import sleep

import torch
import uvicorn

from longitude.core.validate import UserError
from longitude.explorer import page
from longitude.explorer.data import drawn
from longitude.explorer.options import Asked
from longitude.explorer.server import HOST, app
from longitude.explorer.snippets import words

PROCESSES = 4
INTERRUPTED = 130  # the exit code after Ctrl-C
OPENS = 0.3  # seconds from the start of the server to that of a browser


def listen(port: int, shared: bool = False) -> socket.socket:
    """A socket on the loopback address; raises where another has the port, unless it is shared with
    that one."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} is no port: give one from 0 to 65535.")
    # named as TCP, connections send what they have at once: asyncio asks for it by that name alone
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((HOST, port))
    except OSError as error:
        held.close()
        raise UserError(
            f"port {port} can't be had ({error.strerror}): give another with --port, or 0."
        ) from None
    return held


def serve(asked: Asked, port: int, browse: bool = True) -> None:
    """Serve the page, and open it in a browser if asked to, until the end of the program."""
    with listen(port) as alone:  # nobody else has it
        port = alone.getsockname()[1]
    address = f"http://{HOST}:{port}/"
    print(f"longitude explore: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    torch.set_num_threads(1)  # several answers at once, each on one core
    try:
        _serve(asked, port, address if browse else None)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # Python's own end aborts under threads that are inside torch or V8


def _serve(asked: Asked, port: int, opens: str | None) -> None:
    """The page on all cores; `opens` is the address that a browser opens."""
    cores = min(os.cpu_count() or 1, PROCESSES) if sys.platform == "linux" else 1
    others = [_forked(asked, port) for _ in range(cores - 1)]
    try:
        if opens:
            opened = Timer(OPENS, webbrowser.open, (opens,))
            opened.daemon = True
            opened.start()
        _run(asked, listen(port, shared=cores > 1))
    finally:
        for one in others:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGTERM)


def _forked(asked: Asked, port: int) -> int:
    """One more process that answers on the port, for Python itself computes on one core: the kernel
    deals connections out. Only where forks are safe beside torch."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        Thread(target=_follow, args=(parent,), daemon=True).start()
        _run(asked, listen(port, shared=True))
    finally:
        os._exit(0)  # whatever ended it: the rest is the first process's to do


def _run(asked: Asked, held: socket.socket) -> None:
    Thread(target=_warm, args=(asked,), daemon=True).start()
    server(asked).run(sockets=[held])


def _follow(parent: int) -> None:
    """End when the first process has ended, however it did."""
    while os.getppid() == parent:
        sleep(1)
    os._exit(0)


def server(asked: Asked) -> uvicorn.Server:
    """A server of the page, which says nothing of itself."""
    quiet = uvicorn.Config(app(asked), log_level="error", server_header=False, access_log=False)
    return uvicorn.Server(quiet)


def _warm(asked: Asked) -> None:
    """What takes long the first time, before the first reader asks for it."""
    page.vega()
    drawn(asked)
    words(asked, 0)  # imports transformers
