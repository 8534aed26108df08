"""The server behind the page: four addresses on the loopback interface, each answer computed anew.

It keeps no state. Only requests that name this machine by a loopback name are answered (a page of
another host whose name was made to lead here has another), and only the page's own scripts may ask
for numbers. Whatever is wrong with a request is answered in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from longitude.core.validate import UserError, short
from longitude.explorer import page
from longitude.explorer.data import drawn
from longitude.explorer.methods import choices
from longitude.explorer.models import by_name, picked
from longitude.explorer.options import NAME, Asked, read
from longitude.explorer.snippets import words

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost", "[::1]")
BODY = 2**20  # bytes of a configuration
QUERY = 16384  # characters of a link
WORKERS = 1  # thread for pictures: Python computes on one core; words wait in another line
OWN_SITE = ("same-origin", "none")
Answer = Callable[[], str]


class Guard:
    """Lets through what the page itself or a reader's own browser asks for, by a name of this
    machine, and says on every answer that nothing else may be loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = refused(Request(scope))
        await (self.app if refusal is None else refusal)(scope, receive, _stamped(send))


def refused(request: Request) -> Response | None:
    """The answer to a request that is not to be served."""
    host = request.headers.get("host", "").rsplit("@", 1)[-1]
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if name.lower() not in HOSTS:
        return mistake(
            f"this page answers to {HOST} and localhost alone, but was asked as "
            f"{short(host)!r}: use http://{HOST}.",
            403,
        )
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    foreign = origin is not None and urlsplit(origin).netloc != host
    inside = request.url.path.startswith("/api/")
    if foreign or (inside and site is not None and site not in OWN_SITE):
        return mistake("another site's page may not ask for this: open the page itself.", 403)
    if len(request.url.query) > QUERY:
        return mistake(f"a link has {QUERY:,} characters at most: write shorter schemes.", 414)
    return None


def mistake(sentence: str, status: int = 400) -> Response:
    """A sentence that says what was wrong."""
    return JSONResponse({"mistake": sentence}, status)


def app(first: Asked | None = None) -> Starlette:
    """The application; `first` is what a link without a state shows."""
    drawing, reading = CapacityLimiter(WORKERS), CapacityLimiter(1)

    async def answered(answer: Answer, line: CapacityLimiter = drawing) -> Response:
        try:
            text = await to_thread.run_sync(_steady, answer, limiter=line)
        except UserError as error:
            return mistake(str(error))
        return Response(text, media_type="application/json")

    async def root(request: Request) -> Response:
        text = await to_thread.run_sync(page.live, (first or Asked()).link, limiter=drawing)
        return Response(text, media_type="text/html")

    async def draw(request: Request) -> Response:
        return await answered(lambda: drawn(_asked(request)))

    async def methods(request: Request) -> Response:
        return await answered(lambda: json.dumps(choices(_asked(request).own)))

    async def say(request: Request) -> Response:
        return await answered(lambda: json.dumps(_words(request)), reading)

    async def model(request: Request) -> Response:
        if request.method == "POST":
            body = await _body(request)
            return await answered(lambda: json.dumps(_dropped(body)), reading)
        name = request.query_params.get("name", "")
        return await answered(lambda: json.dumps(_named(name)), reading)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        content, kind = await to_thread.run_sync(page.asset, name, limiter=drawing)
        return Response(content, media_type=kind)

    routes = [
        Route("/", root),
        Route("/api/draw", draw),
        Route("/api/methods", methods),
        Route("/api/words", say),
        Route("/api/model", model, methods=["GET", "POST"]),
        Route("/{name}", asset),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http, UserError: _told}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    made.add_middleware(Guard)
    return made


def _steady(answer: Answer) -> str:
    """An answer in spite of Python before 3.11.8, which may miscount the depth of a syntax tree
    while threads take turns (CPython's issue 106905)."""
    try:
        return answer()
    except SystemError:
        return answer()


def _asked(request: Request) -> Asked:
    return read(parse_qsl(request.url.query, keep_blank_values=True))


def _words(request: Request) -> dict[str, Any]:
    query = parse_qsl(request.url.query, keep_blank_values=True)
    rest = [(k, v) for k, v in query if k != "column"]
    column = dict(query).get("column", "1")
    if not (column.isascii() and column.isdigit() and len(column) < 3):
        raise UserError(f"column is 1, 2 or 3, but got {short(column)!r}: give one.")
    return words(read(rest), int(column) - 1)


def _named(name: str) -> dict[str, Any]:
    if not name or len(name) > NAME:
        raise UserError("name a model: a name on the Hub, a folder, a .gguf file, or tiny-rope.")
    return by_name(name).plain()


def _dropped(body: bytes) -> dict[str, Any]:
    try:
        config = json.loads(body)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError("a config.json holds one JSON object, but this holds none: drop another.")
    return picked(config).plain()


async def _body(request: Request) -> bytes:
    held = b""
    async for chunk in request.stream():
        held += chunk
        if len(held) > BODY:
            raise HTTPException(413, f"a config.json has {BODY:,} bytes at most: drop a smaller.")
    return held


async def _http(request: Request, error: HTTPException) -> Response:
    told = {
        404: f"there is nothing at {short(request.url.path)!r}: open / instead.",
        405: f"{short(request.method)} is not answered here: use GET.",
    }
    return mistake(told.get(error.status_code, str(error.detail)), error.status_code)


async def _told(request: Request, error: UserError) -> Response:
    return mistake(str(error), 404)


def _stamped(send: Send) -> Callable[[Any], Awaitable[None]]:
    """Every answer says that nothing is loaded from elsewhere, and that it is not to be kept."""

    async def stamp(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *HEADERS]
        await send(message)

    return stamp


HEADERS = [
    (b"content-security-policy", page.POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]
