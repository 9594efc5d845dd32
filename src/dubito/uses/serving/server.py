"""Run the application with uvicorn, until SIGTERM or Ctrl-C; what is in flight is finished."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError, UnsupportedError
from dubito.uses.runs.run import TableRun
from dubito.uses.serving.application import application
from dubito.uses.serving.limits import ServingLimits

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# How long requests in flight may take once the server was told to stop.
GRACE = 30
# How long a connection may stay open without a request.
IDLE = 30


def check_installed() -> None:
    """Raise if what serving needs is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        told = " and ".join(missing)
        raise UnsupportedError(f"Serving needs {told}, which is not installed: run pip install 'dubito[serve]'.")


@checked_arguments
def serve(
    run: TableRun | str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    coverage: float | None = None,
    risk: float | None = None,
    limits: ServingLimits | None = None,
    token: str | None = None,
    play: bool = False,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a run until SIGTERM or Ctrl-C; requests in flight are finished first.

    Args:
        run: The run, or its folder.
        host: The address to listen at; by default only programs on this machine can connect.
        port: The port; 0 for any that is free.
        coverage: The probability with which an interval holds the truth; that of the run if None.
        risk: The largest risk of an answer; that of the run if None.
        limits: Bounds on requests.
        token: What a request must bring, if it is given; see `application`.
        play: Whether there is also a page to play with; without a token one is drawn, and is a part of its URL.
        ready: Called with the URL once the server listens.
    """
    check_installed()
    if play and token is None:
        token = secrets.token_urlsafe(24)
    with listening(host, port) as listener:
        limits = limits or ServingLimits()
        hosts = LOOPBACK if is_loopback(host) else None
        app = application(run, coverage=coverage, risk=risk, limits=limits, token=token, hosts=hosts, play=play)
        shown = f"[{host}]" if ":" in host else host
        path = f"/?token={quote(token or '')}" if play else ""
        if ready is not None:
            ready(f"http://{shown}:{listener.getsockname()[1]}{path}")
        run_application(app, listener, limits)


def run_application(app: Any, listener: socket.socket, limits: ServingLimits) -> None:
    """Run an application on a socket until SIGTERM or Ctrl-C."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, limit_concurrency=limits.connections,
        timeout_keep_alive=IDLE, timeout_graceful_shutdown=GRACE, lifespan="on", ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    # uvicorn stops in order at these signals, and then raises them again, for whom they have no meaning any more
    with _ignoring_sigterm(), contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Provide a socket that listens, or raise in one sentence why it cannot."""
    if not 0 <= port < 2**16:
        raise InputError(f"The port must be a number from 0 to 65535, got {port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # only of sockets that were made with this protocol asyncio sends small packets at once: 40 ms per answer
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listener


def _cannot_listen(host: str, port: int, error: Exception) -> InputError:
    told = getattr(error, "strerror", None) or error
    return InputError(f"The server cannot listen at {host}, port {port} ({told}): choose another --port.")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
