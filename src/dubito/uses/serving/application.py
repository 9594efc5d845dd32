"""The ASGI application: routes, limits and errors. Everything that knows HTTP is here and in `gate`."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import dubito
from dubito.core.arguments import checked_arguments
from dubito.core.errors import DubitoError
from dubito.data import Table
from dubito.uses.runs.folder import load
from dubito.uses.runs.run import TableRun
from dubito.uses.serving.gate import Gate, Telemetry
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.openapi import describe
from dubito.uses.serving.playground import Playground, Question
from dubito.uses.serving.rows import read_json, table_of
from dubito.uses.serving.service import Answer, Batcher, FullError, Service

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


@checked_arguments
def application(
    run: TableRun | str | os.PathLike[str],
    *,
    coverage: float | None = None,
    risk: float | None = None,
    limits: ServingLimits | None = None,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    play: bool = False,
) -> Starlette:
    """Return the ASGI application that serves a run; `dubito serve` runs it with uvicorn.

    Args:
        run: The run, or its folder.
        coverage: The probability with which an interval holds the truth; that of the run if None.
        risk: The largest risk of an answer; that of the run if None.
        limits: Bounds on requests.
        token: What a request must bring as ``Authorization: Bearer TOKEN`` or as ``?token=TOKEN``, if it is given.
        hosts: The host names under which the server may be reached; any if None.
        play: Whether there is also a page to play with, at ``/``.
    """
    loaded = run if isinstance(run, TableRun) else load(run)
    service = Service(loaded, coverage, risk)
    kind = PlayEndpoints if play else Endpoints
    return kind(service, limits or ServingLimits()).application(token=token, hosts=hosts)


class Endpoints:
    """The answers to requests, with the state that they share."""

    def __init__(self, service: Service, limits: ServingLimits) -> None:
        self.service, self.limits, self.telemetry = service, limits, Telemetry()
        self.batcher: Batcher[Table, Answer] = Batcher(
            service.answer, together=limits.together, waiting=limits.waiting, on_batch=self.telemetry.batches.add
        )

    def routes(self) -> dict[str, tuple[str, Callable[[Request], Any]]]:
        """Return the method and the function of each path."""
        return {
            "/predict": ("POST", self.predict),
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.metrics),
            "/openapi.json": ("GET", self.openapi),
        }

    def application(self, *, token: str | None, hosts: Sequence[str] | None) -> Starlette:
        """Return the application with these endpoints."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Route

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield
            await self.batcher.close()

        routes = self.routes()
        gate = Middleware(Gate, telemetry=self.telemetry, paths=frozenset(routes), token=token, hosts=hosts)
        return Starlette(
            routes=[Route(path, function, methods=[method]) for path, (method, function) in routes.items()],
            middleware=[gate],
            exception_handlers={DubitoError: _refused, HTTPException: _refused, FullError: _refused},
            lifespan=lifespan,
        )

    async def predict(self, request: Request) -> Response:
        """Predict the rows of a request."""
        start = perf_counter()
        table = table_of(await self.body(request), self.service.run.encoder.column_names, self.limits)
        answer = await self.batcher.ask(table, len(table))
        self.telemetry.count(answer)
        self.telemetry.seconds.add(perf_counter() - start)
        return json_response(answer.to_json())

    async def health(self, _: Request) -> Response:
        """Say that the server works, and what it predicts."""
        run = self.service.run
        told = {"status": "ok", "dubito": dubito.__version__, "predicts": run.target, "task": run.task}
        return json_response(told)

    async def metrics(self, _: Request) -> Response:
        """Return what was counted."""
        from starlette.responses import Response

        return Response(self.telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        """Describe the API."""
        return json_response(describe(self.service, self.limits))

    async def body(self, request: Request) -> Any:
        """Return the JSON of a request, if it is within the limits."""
        from starlette.exceptions import HTTPException

        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a foreign web page cannot send this type without asking first
            raise HTTPException(415, f"The content type must be application/json, got {kind[:60]!r}.")
        content, most = bytearray(), self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise HTTPException(413, f"The body is larger than {most:,} bytes: send fewer rows at a time.")
        except TimeoutError:
            told = f"The body did not arrive within {self.limits.body_seconds:g} seconds."
            raise HTTPException(408, told) from None
        return read_json(bytes(content))


class PlayEndpoints(Endpoints):
    """The same, with a page to play with and what it asks for."""

    def __init__(self, service: Service, limits: ServingLimits) -> None:
        super().__init__(service, limits)
        self.playground = Playground(service, limits)
        self.asked: Batcher[Question, dict[str, Any]] = Batcher(
            self.playground.answer, together=limits.together, waiting=limits.waiting
        )

    def routes(self) -> dict[str, tuple[str, Callable[[Request], Any]]]:
        """Return the method and the function of each path."""
        return {"/": ("GET", self.page), "/ask": ("POST", self.ask), **super().routes()}

    async def page(self, _: Request) -> Response:
        """Return the page."""
        from starlette.responses import HTMLResponse

        nonce = secrets.token_urlsafe(16)
        policy = {
            "default-src": "'none'", "script-src": f"'nonce-{nonce}'", "style-src": f"'nonce-{nonce}'",
            "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
            "frame-ancestors": "'none'",
        }  # fmt: skip
        told = "; ".join(f"{name} {value}" for name, value in policy.items())
        return HTMLResponse(self.playground.page(nonce), headers={"content-security-policy": told})

    async def ask(self, request: Request) -> Response:
        """Answer the page."""
        question = self.playground.question(await self.body(request))
        return json_response(await self.asked.ask(question, len(question)))


async def _refused(request: Request, error: Exception) -> Response:
    """Say in one sentence what is wrong with a request."""
    from starlette.exceptions import HTTPException

    if isinstance(error, FullError):
        return json_response({"error": "Too many rows are waiting: try again later."}, 503, {"retry-after": "1"})
    if not isinstance(error, HTTPException):
        return json_response({"error": str(error)}, 422)
    told = {
        404: "There is nothing here: /openapi.json describes what there is.",
        405: f"{request.method} is not possible here: /openapi.json describes what is.",
    }
    return json_response({"error": told.get(error.status_code, error.detail)}, error.status_code, error.headers)


def json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return strict JSON in ASCII, so that any text can be in it."""
    from starlette.responses import Response

    content = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(content, status, headers, media_type="application/json")
