"""What `dubito compress` does: with RUN, by its cost or one of twenty candidates; with --data, train and compress."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dubito.cli.arguments import TableOptions
from dubito.cli.changing import training_rows
from dubito.cli.delivery import Experiment
from dubito.cli.failures import QUIET
from dubito.cli.options import read_data, read_methods, read_training
from dubito.cli.output import command_line, note, print_json
from dubito.core import grammar
from dubito.core.atomic import check_place
from dubito.core.errors import InputError
from dubito.data import DataSet, TableTransform
from dubito.fitting.training import Training
from dubito.uses import runs
from dubito.uses.compression import Compression, compress
from dubito.uses.compression.page import compression_section
from dubito.uses.compression.rules import Rule
from dubito.uses.export import find_format
from dubito.uses.runs.folder import REPORT, check_folder, write_report
from dubito.uses.runs.run import TableRun
from dubito.uses.runs.shrinking import run_of
from dubito.uses.runs.table_fit import likelihood_for

# What the smaller network may cost, unless another share is given.
AT_MOST = "0.5%"
# The page of `--explore`, in the folder of the run.
EXPLORE = "explore.html"

METHOD = "variational(prior=priors.LogUniform(), kl_warmup=0.5)"


def compress_run(
    folder: Path,
    at_most: str | None,
    out: Path | None,
    *,
    candidate: int | None,
    save: Path | None,
    export: Path | None,
    table: Path | None,
    rule: str | None,
    structure: str | None,
    method: str | None,
    finetune: int,
    model: str | None,
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make the network of a run smaller, and write a run with a posterior over what is left."""
    from dubito.uses.export import find_format

    if out is not None:
        check_folder(out, overwrite=overwrite)
    for path in (save, export):
        if path is not None:
            check_place(path, "The network")
    if export is not None:
        find_format(export)
    if candidate is not None and (at_most is not None or structure is not None):
        raise InputError("--pick says what is removed: leave --at-most and --structure out.")
    share, wanted = read_share(at_most or AT_MOST), read_rule(rule)
    recipe = None if method is None else read_methods([method])[0]
    kind: Any = structure or "units"  # checked below
    run = runs.load(folder, model=model)
    dataset = training_rows(run, table)
    small, made = runs.compressed(
        run, dataset, share, candidate=candidate, rule=wanted, structure=kind, recipe=recipe,
        finetune=finetune, seed=seed, progress=not QUIET.get(),
    )  # fmt: skip
    small = replace(small, settings={**small.settings, "command": command_line()})
    written = _write(small, out, save, export, overwrite)
    found = made.report(dataset.test, feature_names=dataset.feature_names, target_scale=dataset.target_scale)
    others = {str(run.settings.get("name", "before")): run.scores}
    if out is not None:
        write_report(small, out / REPORT, others=others, more=(compression_section(found),))
    before, after = (_main_scores(each) for each in (run, small))
    if as_json:
        print_json({"run": str(out or save or export), "report": found.to_json(), "before": before, "after": after})
        return
    print(found)
    print("run before      " + "  ".join(f"{name} {value:.4f}" for name, value in before.items()))
    print("run after       " + "  ".join(f"{name} {value:.4f}" for name, value in after.items()))
    if candidate is None:
        _note_cost(before, after, share)
    for line in written:
        note(line)


def _write(run: TableRun, out: Path | None, save: Path | None, export: Path | None, overwrite: bool) -> list[str]:
    """Write a run as a folder, as one file and for other programs, as far as asked for; return what was written."""
    told = []
    if out is not None:
        run.save(out, overwrite=overwrite)
        told.append(f"the smaller run is in {out}, its report in {out / REPORT}")
    if save is not None:
        told.append(f"{save}: {runs.pack(run, save):,} bytes; `dubito predict {save} TABLE` predicts new rows")
    if export is not None:
        told.append(f"{export}: {runs.export(run, export).num_bytes:,} bytes; it takes one number for each column")
    return told


def explore_run(
    folder: Path,
    page: Path | None,
    *,
    table: Path | None,
    rule: str | None,
    method: str | None,
    model: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure twenty smaller networks of a run, and write a page to choose from."""
    page = (folder / EXPLORE if folder.is_dir() else Path(EXPLORE)) if page is None else page
    check_place(page, "The report")
    wanted, recipe = read_rule(rule), None if method is None else read_methods([method])[0]
    run = runs.load(folder, model=model)
    dataset = training_rows(run, table)
    found = runs.explored(run, dataset, rule=wanted, recipe=recipe, seed=seed, progress=not QUIET.get())
    given = {"--data": table, "--rule": rule, "--method": method, "--model": model, "--seed": seed or None}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    pick = f"{shlex.join(['dubito', 'compress', str(folder), *options])} --pick {{}} -o {shlex.quote(folder.name)}-{{}}"
    found.page(page, pick=pick, data_name=str(run.settings.get("table")), command=command_line())
    print_json(found.to_json()) if as_json else print(found)
    note(f"the pictures are in {page}; add --pick NUMBER and -o RUN to make one of them")


def _note_cost(before: dict[str, float], after: dict[str, float], share: float) -> None:
    """Say if the held-out rows lost more than was allowed on the rows that chose what to remove."""
    if "accuracy" in before:
        lost, what = before["accuracy"] - after["accuracy"], "the accuracy fell by"
    else:
        lost, what = after["rmse"] / before["rmse"] - 1, "the root mean squared error grew by"
    if lost > share:
        note(f"on the held-out rows {what} {lost:.2%}, more than the {share:.2%} allowed on the training rows: "
             "allow less, or add --finetune 20")  # fmt: skip


def read_share(text: str) -> float:
    """Return the fraction that a text such as "0.5%" or "0.005" means."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(f"'{text}' is not a share from 0% to below 100%; write 0.5% or 0.005.")
    return share


def _main_scores(run: TableRun) -> dict[str, float]:
    names = ("accuracy", "nll", "ece") if run.task == "classification" else ("rmse", "nll", "coverage@0.9")
    return {name: run.scores.scores[name] for name in names if name in run.scores.scores}


def read_rule(text: str | None) -> Rule | None:
    """Return the rule that the text describes; None stands for the posterior's default."""
    if text is None:
        return None
    rule = grammar.parse(text, "rules")
    if not isinstance(rule, Rule):
        raise InputError(f'\'{text}\' is not a rule; write one such as "magnitude(0.9)" or "log_alpha(3)".')
    return rule


def compress_data(
    data: str,
    table: TableOptions,
    training: dict[str, Any],
    *,
    limit: int | None,
    page: Path | None,
    rule: str | None,
    method: str | None,
    model: str | None,
    seed: int,
    as_json: bool,
    structure: str | None,
    finetune: int,
    save: Path | None,
    export: Path | None,
) -> None:
    """Train a network on a data set, compress it, write what was asked for, and print a report."""
    for path in (save, export, page):
        if path is not None:
            check_place(path, "The network")
    if export is not None:
        find_format(export)
    chosen, wanted = read_training(None, **training), read_rule(rule)
    dataset = read_data(data, table, split=0, gap=False, limit=limit, limit_test=None)
    made = fit_and_compress(
        dataset, model=model or "mlp", method=method or METHOD, rule=wanted, structure=structure or "weights",
        training=chosen, finetune=finetune, seed=seed,
    )  # fmt: skip
    report = made.report(dataset.test, feature_names=dataset.feature_names, target_scale=dataset.target_scale)
    if page is not None:
        report.page(page, data_name=dataset.name, command=command_line())
    if save is not None:
        save_network(made, dataset, model or "mlp", save, seed)
    if export is not None:
        made.export(export)
    print_json(report.to_json()) if as_json else print(report)


def fit_and_compress(
    dataset: DataSet,
    *,
    model: str,
    method: str,
    rule: Rule | None,
    structure: str,
    training: dict[str, Any],
    finetune: int,
    seed: int,
) -> Compression:
    """Train a network, find its posterior, and compress it; amounts are judged on the validation part."""
    (recipe,) = read_methods([method])
    experiment = Experiment(
        dataset, model=model, recipes=(recipe,), likelihood=likelihood_for(None, dataset), training=training
    )
    experiment.check()
    posterior = experiment.posterior(recipe, seed)
    options: dict[str, Any] = {"data": dataset.validation or dataset.test, "structure": structure}
    if finetune:
        options |= {"finetune": dataset.train, "training": Training(epochs=finetune, lr=1e-3, schedule="linear")}
    return compress(posterior, rule, **options, generator=torch.Generator().manual_seed(seed))


def save_network(made: Compression, dataset: DataSet, model: str, path: Path, seed: int) -> None:
    """Write a compressed network to one file: as a run if its data was a table, so that it can predict new rows."""
    if not isinstance(dataset.encoder, TableTransform):
        made.save(path)
        return
    size = runs.pack(run_of(made, dataset, model, seed=seed, progress=not QUIET.get()), path)
    note(f"{path}: {size:,} bytes; `dubito predict {path} TABLE` predicts new rows")
