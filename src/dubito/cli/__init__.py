"""The command line: parse, make a recipe, call a public function."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the entry point of the `dubito` command."""
    from dubito.cli.app import app

    app()
