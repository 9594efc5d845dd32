"""The command line: parse the options, call a public function, print."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the `dubito` command."""
    from dubito.cli.app import app

    app()
