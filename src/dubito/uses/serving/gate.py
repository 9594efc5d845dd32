"""What every request passes: host and token, security headers, counts, and an answer in place of a traceback."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from dubito.uses.serving.telemetry import Telemetry

_LOG = logging.getLogger("dubito.serving")
# Who looks whether the server is alive has no token.
_OPEN = "/health"
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Gate:
    """ASGI middleware around all routes.

    Args:
        app: The application inside.
        telemetry: Where requests are counted.
        paths: The paths that are counted by name.
        token: What a request must bring; None if nothing.
        hosts: The host names under which the server may be reached; any if None.
    """

    def __init__(
        self, app: Any, *, telemetry: Telemetry, paths: frozenset[str], token: str | None, hosts: Sequence[str] | None
    ) -> None:
        self.app, self.telemetry, self.paths, self.token, self.hosts = app, telemetry, paths, token, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.telemetry.requests[path, message["status"]] += 1
                own = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        self.telemetry.in_flight += 1
        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, receive, sending)
            else:
                await _answer(sending, *refusal)
        except Exception:  # noqa: BLE001 - it is logged, and the client is told
            _LOG.exception("A request to %s failed.", path)
            if not started:
                await _answer(sending, 500, "The server failed to answer; its log says why.")
        finally:
            self.telemetry.in_flight -= 1

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """Return the status and the sentence for a request that may not pass, or None."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts is not None and _without_port(headers.get("host", "")) not in self.hosts:
            return 421, f"This server is reached as {' or '.join(self.hosts)} only."
        if self.token is None or scope["path"] == _OPEN:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = bearer.strip()
        if not secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            return 401, "The token is missing or wrong: send 'Authorization: Bearer TOKEN', or open the whole URL."
        return None


def _without_port(host: str) -> str:
    """Return a host name without its port.

    >>> _without_port("localhost:8000"), _without_port("[::1]:80"), _without_port("[::1]")
    ('localhost', '[::1]', '[::1]')
    """
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


async def _answer(send: Any, status: int, sentence: str) -> None:
    content = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
