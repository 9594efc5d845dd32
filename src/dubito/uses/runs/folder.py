"""The folder of a run: settings, encoder, posterior, calibration, rows that were not trained on, decisions, report."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dubito.core import io
from dubito.core.arguments import checked_arguments
from dubito.core.atomic import write_atomic
from dubito.core.errors import FileFormatError, InputError, MissingDataError
from dubito.data import Pair, TableTransform
from dubito.fitting.loading import load as load_rule
from dubito.fitting.loading import load_posterior
from dubito.uses.compression import storage
from dubito.uses.reporting import Evaluation
from dubito.uses.reporting.page import write_page
from dubito.uses.reporting.parts import Section
from dubito.uses.runs.calibration import Calibration
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.run import TableRun
from dubito.uses.runs.scoring import with_texts
from dubito.uses.runs.table_fit import new_network

_FORMAT = "dubito.run/1"
SETTINGS, ENCODER, POSTERIOR, CALIBRATION = (
    "run.json",
    "encoder.json",
    "posterior.safetensors",
    "calibration.safetensors",
)
TEXTS = "texts.json"  # the columns of free text, if there are any
ROWS, SCORES, REPORT, SMALL = "rows.safetensors", "scores.json", "report.html", "network.safetensors"
DECISIONS = "decisions"  # a folder with one file for each decision rule
# Of the rows that were not trained on, at most so many of each part are kept.
MOST_ROWS = 50_000


def save(run: TableRun, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a run as a folder, at once: it is written under another name and then renamed.

    Args:
        run: The run.
        path: The folder; it must not exist.
        overwrite: Whether to replace another run there.
    """
    target = Path(path)
    check_folder(target, overwrite=overwrite)
    temporary = target.with_name(f".{target.name[:40]}.dubito-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        write_files(run, temporary)
        write_report(run, temporary / REPORT)
        if target.exists():
            old = target.with_name(f"{temporary.name}-old")
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.rename(target)
    except OSError as error:
        raise FileFormatError(f"Cannot write the run '{path}': {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def write_files(run: TableRun, folder: Path, *, most_rows: int = MOST_ROWS) -> None:
    """Write the files of a run into an empty folder, all but its report."""
    settings = {"format": _FORMAT, "network": run.network.to_json(), "settings": dict(run.settings)}
    run.posterior.save(folder / POSTERIOR)
    if run.settings.get("compressed"):
        storage.save(folder / SMALL, run.posterior.model, "dense")
    io.save(folder / CALIBRATION, "calibration", run.calibration.to_tree())
    rows = {part: {"inputs": x[:most_rows], "targets": y[:most_rows]} for part, (x, y) in run.parts.items()}
    io.save(folder / ROWS, "rows", rows)
    texts = {
        part: {name: list(each)[:most_rows] for name, each in own.items()} for part, own in run.texts.items() if own
    }
    if texts:
        write_atomic(folder / TEXTS, _json(texts))
    if run.decisions:
        (folder / DECISIONS).mkdir()
    for name, rule in run.decisions.items():
        rule.save(folder / DECISIONS / f"{name}.safetensors", with_posterior=False)
    write_atomic(folder / ENCODER, run.encoder.to_json().encode())
    write_atomic(folder / SCORES, _json(_scores(run).to_json()))
    write_atomic(folder / SETTINGS, _json(settings))


def _scores(run: TableRun) -> Evaluation:
    return with_texts(run.scores, run.texts.get("held_out", {}))


def write_report(
    run: TableRun, path: Path, *, others: Mapping[str, Evaluation] | None = None, more: Sequence[Section] = ()
) -> None:
    """Write the report of a run.

    Args:
        run: The run.
        path: The file.
        others: Evaluations of other runs on the same rows, to compare with.
        more: Sections to add.
    """
    settings = run.settings
    parts = ", ".join(f"{len(targets):,} {part.replace('_', ' ')}" for part, (_, targets) in run.parts.items())
    facts = {
        "Table": f"{settings.get('table', 'not from a file')}, column {run.target}; kept rows: {parts}",
        "Network": repr(run.unguarded.model),
        "Likelihood": repr(run.posterior.likelihood),
        "Seed": str(settings.get("seed", 0)),
    }
    results = {**(others or {}), str(settings.get("name", "run")): _scores(run)}
    write_page(
        results, path, data_name=settings.get("table"), command=settings.get("command"), facts=facts,
        more=more,
    )  # fmt: skip


@checked_arguments
def load(path: str | os.PathLike[str], *, model: nn.Module | str | None = None) -> TableRun:
    """Read the run that `dubito fit`, `TableRun.save` or `runs.pack` wrote.

    Args:
        path: The folder, or the file of a packed run.
        model: The network, or a function ``"net.py:build"`` that makes it, if it was not built by name and its file has
            moved or changed. Loading a run with a network from a file runs the code of that file.
    """
    with _opened(Path(path)) as folder:
        return _load(folder, model)


@contextmanager
def _opened(path: Path) -> Iterator[Path]:
    """Provide the folder of a run, also of a packed one; errors name the file then."""
    if not _is_packed(path):
        yield path
        return
    from dubito.uses.runs.packed import unpacked

    with unpacked(path) as place:
        try:
            yield place
        except FileFormatError as error:
            raise FileFormatError(str(error).replace(str(place), str(path))) from error


def _load(folder: Path, model: nn.Module | str | None) -> TableRun:
    content = _read_json(folder / SETTINGS, folder)
    with io.reading(folder / SETTINGS):
        if content["format"] != _FORMAT:
            raise FileFormatError(f"'{folder}' needs another version of Dubito (format {content['format']}).")
        source, settings = NetworkSource.from_json(content["network"]), dict(content["settings"])
    network = _network(folder, source, model)
    if settings.get("compressed"):
        network = storage.load(folder / SMALL, network)
    with io.reading(folder / ENCODER):
        encoder = TableTransform.from_json(json.dumps(_read_json(folder / ENCODER, folder)))
    calibration = io.load(folder / CALIBRATION, "calibration")
    rows = io.load(folder / ROWS, "rows")
    with io.reading(folder):
        parts = {part: (pair["inputs"], pair["targets"]) for part, pair in rows.items()}
        if not all(isinstance(x, Tensor) and isinstance(y, Tensor) and len(x) == len(y) for x, y in parts.values()):
            raise FileFormatError(f"'{folder / ROWS}' does not hold rows with targets.")
        posterior = load_posterior(folder / POSTERIOR, network)
        files = sorted((folder / DECISIONS).glob("*.safetensors"))
        decisions = {file.stem: load_rule(file, posterior) for file in files}
        return TableRun(
            posterior, encoder, source, Calibration.from_tree(calibration), parts,
            Evaluation.from_json(_read_json(folder / SCORES, folder)), settings, decisions,
            _texts(folder, parts),
        )  # fmt: skip


def _texts(folder: Path, parts: Mapping[str, Pair]) -> dict[str, dict[str, list[str | None]]]:
    """Return the columns of free text; each has one text per row of its part."""
    texts = _read_json(folder / TEXTS, folder) if (folder / TEXTS).exists() else {}
    for part, columns in texts.items():
        for name, each in columns.items():
            if len(each) != len(parts[part][1]) or not all(text is None or isinstance(text, str) for text in each):
                raise FileFormatError(f"'{folder / TEXTS}' was altered or damaged: {name!r} has other rows.")
    return dict(texts)


def load_summary(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Evaluation]:
    """Return the settings and the scores of a run, without its posterior."""
    with _opened(Path(path)) as folder:
        content = _read_json(folder / SETTINGS, folder)
        with io.reading(folder):
            return dict(content["settings"]), Evaluation.from_json(_read_json(folder / SCORES, folder))


def _network(folder: Path, source: NetworkSource, model: nn.Module | str | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, str):
        source = source.moved(model)
    else:
        source.check_unchanged(folder)
    return new_network(source, 0)


def check_folder(path: Path, *, overwrite: bool = False) -> None:
    """Raise, before any work is done, if a run cannot be written to a folder."""
    try:
        exists, is_run, parent = path.exists(), (path / SETTINGS).is_file(), path.resolve().parent
        empty = path.is_dir() and not any(path.iterdir())
        has_parent = parent.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise InputError(f"A run cannot be written to '{path}': {getattr(error, 'strerror', error)}.") from error
    if exists and not is_run and not empty:
        raise InputError(f"A run cannot be written to '{path}': something else is there; choose another name.")
    if is_run and not overwrite:
        raise InputError(f"There is a run in '{path}' already: choose another name, or say --overwrite.")
    if not has_parent:
        raise InputError(f"A run cannot be written to '{path}': the folder '{path.parent}' does not exist.")
    if not os.access(parent, os.W_OK):
        raise InputError(f"A run cannot be written to '{path}': the folder '{path.parent}' is not writable.")


def is_file_of_run(name: str) -> bool:
    """Return whether a run may have a file of this name, relative to its folder."""
    own = (SETTINGS, ENCODER, POSTERIOR, CALIBRATION, TEXTS, ROWS, SCORES, SMALL)
    return name in own or re.fullmatch(rf"{DECISIONS}/[\w-]{{1,100}}\.safetensors", name) is not None


def _is_packed(path: Path) -> bool:
    """Return whether a path is a file that begins as a packed run does."""
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"PK"
    except (OSError, ValueError):  # a folder, nothing, or no name of a file
        return False


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a run."""
    try:
        return (Path(path) / SETTINGS).is_file()
    except (OSError, ValueError):
        return False


def _read_json(path: Path, folder: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"lacks {path.name}" if folder.is_dir() else "is no run" if folder.exists() else "does not exist"
        kind = FileFormatError if folder.exists() else MissingDataError
        raise kind(
            f"'{folder}' {what}: give the folder that `dubito fit ... -o FOLDER` wrote, or a file of `--save`."
        ) from error
    except (OSError, ValueError) as error:
        raise FileFormatError(f"'{path}' cannot be read: it was altered or damaged ({error}).") from error


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
