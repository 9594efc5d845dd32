"""Call an ASGI application without a network, and servers in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from run_cases import reviews, run_of

HOUSE = {"size": 120.0, "town": "Ulm"}
__all__ = ["HOUSE", "Reply", "ask", "call", "program", "reviews", "run_of", "within"]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: Any, method: str, target: str, body: bytes | list[bytes] = b"", headers: dict[str, str] | None = None
) -> Reply:
    """Send one request to an ASGI application; a list is a body that arrives in parts."""
    parts = body if isinstance(body, list) else [body]
    incoming = [
        {"type": "http.request", "body": part, "more_body": place + 1 < len(parts)} for place, part in enumerate(parts)
    ]
    outgoing: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()  # a client that sends nothing more
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        outgoing.append(message)

    path, _, query = target.partition("?")
    given = {"host": "localhost:8000", **({"content-type": "application/json"} if body else {}), **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    head = {name.decode(): value.decode() for name, value in outgoing[0]["headers"]}
    return Reply(outgoing[0]["status"], head, b"".join(part.get("body", b"") for part in outgoing[1:]))


def within(app: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run work while the application is up, from its start to its end."""

    async def all_of_it() -> Any:
        async with app.router.lifespan_context(app):
            return await work()

    return asyncio.run(all_of_it())


def ask(app: Any, method: str, target: str, value: Any = None, **headers: str) -> Reply:
    """Send one request with a JSON body."""
    body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
    return within(app, lambda: call(app, method, target, body, headers))


@contextmanager
def program(*words: Any, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `dubito` with these words, and provide the process and the URL that it prints."""
    code = "import sys; from dubito.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stderr is not None
        told = ""
        while "http://" not in told:
            line = process.stderr.readline()
            assert line, f"the server did not start: {told}"
            told += line
        url = next(word for word in told.split() if word.startswith("http://"))
        wait_until_up(url)
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until_up(url: str) -> None:
    base = "/".join(url.split("/")[:3])
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
            return
        except urllib.error.URLError:
            time.sleep(0.05)
    raise AssertionError(f"nothing answers at {base}")
