"""Turn errors into one line on stderr and an exit code, without a traceback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import typer
from typer.core import TyperGroup

from dubito.core.errors import DubitoError, MissingDataError, NonFiniteError

FAILURE, BAD_INPUT, MISSING_DATA, INTERRUPTED = 1, 2, 3, 130

# Whether ``--quiet`` was given: no notes and no progress bars.
QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
# The words after `dubito`, so that a report can say how it was made.
WORDS: ContextVar[tuple[str, ...]] = ContextVar("words", default=())
# Options that may stand at any position.
_ANYWHERE = ("--debug", "--quiet", "-q")

# Newer versions of typer carry a copy of click; the base of its usage errors is reached the same way in all of them.
_UsageError: Any = typer.BadParameter.__bases__[0]


class CommandGroup(TyperGroup):
    """A group of commands that prints errors in one line; ``--debug`` and ``--quiet`` may stand at any position."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and turn errors into exit codes."""
        words = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in words
        quiet = QUIET.set("--quiet" in words or "-q" in words)
        words = [word for word in words if word not in _ANYWHERE]
        typed = WORDS.set(tuple(words))
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
            except Exception as error:
                if debug:
                    raise
                code = _explain(error)
            finally:
                QUIET.reset(quiet)
                WORDS.reset(typed)
        if standalone_mode:
            sys.exit(code or 0)
        return code


@contextmanager
def interruptible(told: str) -> Iterator[None]:
    """After Ctrl-C inside of the block, say what became of the work, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"dubito: interrupted; {told}\n")
        raise typer.Exit(INTERRUPTED) from None


def exit_code(error: Exception) -> int:
    """Return the exit code for this kind of error."""
    if isinstance(error, MissingDataError):
        return MISSING_DATA
    if isinstance(error, NonFiniteError):
        return FAILURE
    return BAD_INPUT if isinstance(error, DubitoError | _UsageError) else FAILURE


def _explain(error: Exception) -> int:
    """Print the error in one line, and return its exit code."""
    if isinstance(error, _UsageError):
        hint = f" (see '{error.ctx.command_path} --help')" if getattr(error, "ctx", None) else ""
        sentence = error.format_message()
        message = f"{sentence}{'' if sentence.endswith(('.', '?')) else '.'}{hint}"
    elif isinstance(error, DubitoError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error} (run again with --debug to see where)"
    sys.stderr.write(f"dubito: error: {' '.join(message.split())}\n")
    return exit_code(error)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"dubito: warning: {' '.join(str(message).split())}\n")
