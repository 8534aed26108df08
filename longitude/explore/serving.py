"""The page served: on the loopback address, until Ctrl-C."""

from __future__ import annotations

import socket
import sys
import webbrowser
from threading import Thread, Timer

import torch
import uvicorn

from longitude.explore import page
from longitude.explore.asked import Asked
from longitude.explore.drawing import drawn
from longitude.explore.server import HOST, app
from longitude.explore.words import words
from longitude.fields import Mistake

OPENS = 0.3  # seconds from the start of the server to that of a browser


def listen(port: int) -> socket.socket:
    """A socket on the loopback address; raises where another has it."""
    if not 0 <= port < 2**16:
        raise Mistake(f"--port {port} is no port: give one from 0 to 65535.")
    # named as TCP, connections send what they have at once: asyncio asks for it by that name alone
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((HOST, port))
    except OSError as error:
        held.close()
        raise Mistake(
            f"port {port} can't be had ({error.strerror}): give another with --port, or 0."
        ) from None
    return held


def serve(asked: Asked, port: int, browse: bool = True) -> None:
    """Serve the page, and open it in a browser if asked to."""
    held = listen(port)
    address = f"http://{HOST}:{held.getsockname()[1]}/"
    print(f"longitude explore: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    torch.set_num_threads(1)  # several answers at once, each on one core
    Thread(target=_warm, args=(asked,), daemon=True).start()
    if browse:
        opened = Timer(OPENS, webbrowser.open, (address,))
        opened.daemon = True
        opened.start()
    server(asked).run(sockets=[held])


def server(asked: Asked) -> uvicorn.Server:
    """A server of the page, which says nothing of itself."""
    quiet = uvicorn.Config(app(asked), log_level="error", server_header=False, access_log=False)
    return uvicorn.Server(quiet)


def _warm(asked: Asked) -> None:
    """What takes long the first time, before the first reader asks for it."""
    page.library()
    drawn(asked)
    words(asked, 0)  # imports transformers
