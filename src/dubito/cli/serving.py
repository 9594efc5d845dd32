"""`dubito serve` and `play`: the predictions of a run over HTTP, and a page to play with."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dubito.cli import arguments as args

Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="The port; 0 for any free one.")]
TOKEN = "DUBITO_TOKEN"


def serve(
    run: args.RunFolder,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Port = 8000,
    risk: args.Risk = None,
    coverage: args.OtherCoverage = None,
    max_rows: Annotated[int, typer.Option("--max-rows", metavar="N", help="The most rows of one request.")] = 1000,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", metavar="N", help="The most bytes of one request.")
    ] = 1_000_000,
    model: args.MovedModel = None,
    config: args.Config = None,
) -> None:
    """Serve a run."""
    from dubito.cli.output import note
    from dubito.uses import runs, serving

    serving.check_installed()
    limits = serving.ServingLimits(rows=max_rows, body_bytes=max_bytes)
    token = os.environ.get(TOKEN)
    if token is None and not serving.is_loopback(host):
        note(f"anyone who reaches {host} can use this server: set {TOKEN}, or put it behind a proxy with a login")

    def ready(url: str) -> None:
        note(f"serving {run} at {url} (POST {url}/predict; {url}/openapi.json describes it); Ctrl-C stops it")

    loaded = runs.load(run, model=model)
    serving.serve(loaded, host=host, port=port, coverage=coverage, risk=risk, limits=limits, token=token, ready=ready)


def play(
    run: args.RunFolder,
    port: Port = 0,
    risk: args.Risk = None,
    coverage: args.OtherCoverage = None,
    model: args.MovedModel = None,
    config: args.Config = None,
) -> None:
    """Play with a run in the browser."""
    from dubito.cli.output import note
    from dubito.uses import runs, serving

    def ready(url: str) -> None:
        note(f"open this address in a browser; Ctrl-C stops it:\n{url}")

    serving.check_installed()
    serving.serve(runs.load(run, model=model), port=port, coverage=coverage, risk=risk, play=True, ready=ready)
