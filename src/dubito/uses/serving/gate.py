"""What every request passes: host and token, security headers, counts (as Prometheus reads them), kind errors."""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from dubito.uses.serving.service import Answer

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

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


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


class CountsByBound:
    """How often a value was at most each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        """Return the histogram as text; the counts are cumulative."""
        found, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            found.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*found, f"{name}_sum {self.total:.6g}", f"{name}_count {seen}"]


class Telemetry:
    """What a server did since it started. It is used by the event loop alone, so it needs no lock."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.decisions: Counter[str] = Counter()
        self.odd: Counter[str] = Counter()
        self.seconds = CountsByBound(SECONDS)
        self.batches = CountsByBound(ROWS)
        self.in_flight = 0

    def count(self, answer: Answer) -> None:
        """Count the rows of an answer."""
        self.decisions.update(str(row["decision"]) for row in answer.predictions)
        for kind in ("unseen", "outside", "missing"):
            self.odd[kind] += getattr(answer.tally, kind).total()

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus.

        >>> telemetry = Telemetry()
        >>> telemetry.requests["/predict", 200] += 1
        >>> print(telemetry.text().splitlines()[2])
        dubito_requests_total{path="/predict",status="200"} 1
        """
        requests = {f'path="{path}",status="{status}"': count for (path, status), count in self.requests.items()}
        decisions = {f'decision="{name}"': count for name, count in self.decisions.items()}
        odd = {f'kind="{name}"': count for name, count in self.odd.items()}
        lines = [
            *_counter("dubito_requests_total", "Requests by path and status.", requests),
            *_counter("dubito_rows_total", "Rows that were predicted, by decision.", decisions),
            *_counter("dubito_odd_cells_total", "Cells that training did not prepare for, by kind.", odd),
            *_head("dubito_in_flight", "Requests that are being answered.", "gauge"),
            f"dubito_in_flight {self.in_flight}",
            *_head("dubito_predict_seconds", "Time from the head of a request to its answer.", "histogram"),
            *self.seconds.lines("dubito_predict_seconds"),
            *_head("dubito_batch_rows", "Rows that were predicted together.", "histogram"),
            *self.batches.lines("dubito_batch_rows"),
        ]
        return "\n".join(lines) + "\n"


def _head(name: str, told: str, kind: str) -> list[str]:
    return [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]


def _counter(name: str, told: str, values: dict[str, int]) -> list[str]:
    return [*_head(name, told, "counter"), *(f"{name}{{{labels}}} {count}" for labels, count in sorted(values.items()))]
