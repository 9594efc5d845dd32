"""Train a network on a data set and compress it, as `dubito compress --data` asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dubito.cli.arguments import TableOptions
from dubito.cli.experiment import Experiment
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
from dubito.uses.compression.rules import Rule
from dubito.uses.export import find_format
from dubito.uses.runs.shrinking import run_of
from dubito.uses.runs.table_fit import likelihood_for

METHOD = "variational(prior=priors.LogUniform(), kl_warmup=0.5)"


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
