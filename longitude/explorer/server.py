"""The interactive page, served on the loopback address until Ctrl-C.

The server keeps no state: each answer is computed from its request. Only requests that name this
machine by a loopback name are answered (DNS rebinding would use another name), and only the page's
own scripts may ask for numbers. The page loads nothing from another address, which its content
security policy enforces. Every error in a request is answered with one sentence.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from threading import Thread, Timer
from time import sleep
from typing import Any
from urllib.parse import parse_qsl

import torch
import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longitude.core.validate import UserError, short
from longitude.explorer.api import PACKAGE, SCRIPTS, live_page
from longitude.explorer.data import draw
from longitude.explorer.methods import choices, snippets
from longitude.explorer.state import MAX_NAME, PageState, read_link, start_from, start_from_config
from longitude.viz import files

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost", "[::1]")
MAX_BODY = 2**20  # bytes of a configuration
MAX_QUERY = 16384  # characters of a link
MAX_PROCESSES = 4
INTERRUPTED = 130  # the exit code after Ctrl-C
BROWSER_DELAY = 0.3  # seconds from the start of the server to that of a browser
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
ASSETS = dict.fromkeys(("vega.js", *SCRIPTS), "text/javascript") | {"page.css": "text/css"}


def refuse(request: Request) -> Response | None:
    """The refusal of a request that comes from another site, names this machine by other than a
    loopback name, or has too long a query; None if the request is to be answered."""
    host = request.headers.get("host", "").rsplit("@", 1)[-1]
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if name.lower() not in HOSTS:
        return error(
            f"this page answers to {HOST} and localhost alone, but was requested as "
            f"{short(host)!r}: use http://{HOST}.",
            403,
        )
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    foreign = origin is not None and origin.partition("://")[2] != host
    inside = request.url.path.startswith("/api/")
    if foreign or (inside and site is not None and site not in ("same-origin", "none")):
        return error("another site's page may not request this: open the page itself.", 403)
    if len(request.url.query) > MAX_QUERY:
        return error(f"a link has {MAX_QUERY:,} characters at most: write shorter schemes.", 414)
    return None


def error(sentence: str, status: int = 400) -> Response:
    """A response that says in a sentence what was wrong."""
    return JSONResponse({"mistake": sentence}, status)


def app(first: PageState | None = None) -> Starlette:
    """The application; `first` is what a link without a state shows."""
    drawing, reading = CapacityLimiter(1), CapacityLimiter(1)  # Python computes on one core anyway

    def api(answer: Callable[[Request, bytes], Any], line: CapacityLimiter = drawing) -> Any:
        async def endpoint(request: Request) -> Response:
            body = await _body(request) if request.method == "POST" else b""
            try:
                result = await to_thread.run_sync(_retried, answer, request, body, limiter=line)
            except UserError as wrong:
                return error(str(wrong))
            text = result if isinstance(result, str) else json.dumps(result)
            return Response(text, media_type="application/json")

        return endpoint

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = refuse(request) or await call_next(request)
        answer.headers.update(HEADERS)
        return answer

    async def page(request: Request) -> Response:
        text = await to_thread.run_sync(live_page, (first or PageState()).link, limiter=drawing)
        return Response(text, media_type="text/html")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404)
        is_ours = name != "vega.js"
        text = files.asset(PACKAGE, name) if is_ours else await to_thread.run_sync(files.vega)
        return Response(text, media_type=ASSETS[name])

    routes = [
        Route("/", page),
        Route("/api/draw", api(lambda request, _: draw(_state(request)))),
        Route("/api/methods", api(lambda request, _: choices(_state(request).own))),
        Route("/api/snippets", api(_snippets, reading)),
        Route("/api/model", api(_model, reading), methods=["GET", "POST"]),
        Route("/{name}", asset),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, ClientDisconnect: _hung_up}
    served = Starlette(routes=routes, exception_handlers=handlers)
    served.router.redirect_slashes = False
    served.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    return served


def _retried(answer: Callable[[Request, bytes], Any], request: Request, body: bytes) -> Any:
    """Answer, trying again after a SystemError: Python before 3.11.8 may miscount the depth of a
    syntax tree while threads switch (CPython issue 106905)."""
    try:
        return answer(request, body)
    except SystemError:
        return answer(request, body)


def _state(request: Request) -> PageState:
    return read_link(parse_qsl(request.url.query, keep_blank_values=True))


def _snippets(request: Request, _: bytes) -> dict[str, Any]:
    query = parse_qsl(request.url.query, keep_blank_values=True)
    column = dict(query).get("column", "1")
    if not (column.isascii() and column.isdigit() and len(column) < 3):
        raise UserError(f"column is 1, 2 or 3, but got {short(column)!r}: give one.")
    return snippets(read_link((k, v) for k, v in query if k != "column"), int(column) - 1)


def _model(request: Request, body: bytes) -> dict[str, Any]:
    """A model by its name, or by the configuration that was posted."""
    if request.method == "POST":
        try:
            config = json.loads(body)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise UserError("a config.json holds one JSON object, but this has none: drop another.")
        state = start_from_config(config)
    else:
        name = request.query_params.get("name", "")
        if not name or len(name) > MAX_NAME:
            raise UserError("name a model: a name on the Hub, a folder, a .gguf file, tiny-rope.")
        state = start_from(name)
    names = ("model", "own", "window", "dim", "heads", "notes", "link")
    return {name: getattr(state, name) for name in names}


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a config.json has {MAX_BODY:,} bytes at most: drop another.")
    return body


async def _http_error(request: Request, wrong: HTTPException) -> Response:
    sentences = {
        404: f"there is nothing at {short(request.url.path)!r}: open / instead.",
        405: f"{short(request.method)} is not answered here: use GET.",
    }
    return error(sentences.get(wrong.status_code, str(wrong.detail)), wrong.status_code)


async def _hung_up(request: Request, _: ClientDisconnect) -> Response:
    return error("the request ended before its body did: send it again.")  # nobody reads it


def serve(state: PageState, port: int, browser: bool = True) -> None:
    """Serve the page from several processes until the program ends, and open it in a browser."""
    with listen(port) as unshared:  # raises if the port is taken
        port = unshared.getsockname()[1]
    address = f"http://{HOST}:{port}/"
    print(f"longitude explore: {address} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    torch.set_num_threads(1)  # several answers at once, each on one core
    cores = min(os.cpu_count() or 1, MAX_PROCESSES) if sys.platform == "linux" else 1
    children = [_fork(state, port) for _ in range(cores - 1)]
    interrupted = False
    try:
        if browser:
            opener = Timer(BROWSER_DELAY, webbrowser.open, (address,))
            opener.daemon = True
            opener.start()
        _run(state, listen(port, shared=cores > 1))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for process in children:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
    if interrupted:
        os._exit(INTERRUPTED)  # Python's own exit aborts under threads that are inside torch or V8


def listen(port: int, shared: bool = False) -> socket.socket:
    """A socket on the loopback address; raises if the port is taken, unless it is shared."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} is no port: give one from 0 to 65535.")
    # asyncio sets TCP_NODELAY, to send at once, only on sockets that name IPPROTO_TCP
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((HOST, port))
    except OSError as wrong:
        listener.close()
        raise UserError(
            f"port {port} is not available ({wrong.strerror}): give another with --port, or 0."
        ) from None
    return listener


def _fork(state: PageState, port: int) -> int:
    """Fork a process that answers on the same port (the kernel distributes connections): only where
    forks are safe with torch."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)  # torch rebuilds its pool after a fork, which two threads can't do

    def follow() -> None:  # exit once the first process has ended, however that happened
        while os.getppid() == parent:
            sleep(1)
        os._exit(0)

    try:
        Thread(target=follow, daemon=True).start()
        _run(state, listen(port, shared=True))
    finally:
        os._exit(0)  # whatever ended it: cleaning up is left to the first process


def _run(state: PageState, listener: socket.socket) -> None:
    def warm() -> None:  # run what is slow at first use before the first request
        files.vega()
        with suppress(UserError):  # the page shows it as well
            draw(state)
            snippets(state, 0)  # imports transformers

    Thread(target=warm, daemon=True).start()
    server(state).run(sockets=[listener])


def server(state: PageState) -> uvicorn.Server:
    """A server of the page that logs nothing but errors."""
    quiet = uvicorn.Config(app(state), log_level="error", server_header=False, access_log=False)
    return uvicorn.Server(quiet)
