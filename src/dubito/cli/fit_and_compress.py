"""Train a network on a data set and compress it, as `dubito compress --data` asks."""

from __future__ import annotations

from typing import Any

import torch

from dubito.cli.experiment import Experiment
from dubito.cli.options import read_methods
from dubito.core import grammar
from dubito.core.errors import InputError
from dubito.data import DataSet
from dubito.fitting.training import Training
from dubito.uses.compression import Compression, compress
from dubito.uses.compression.rules import Rule
from dubito.uses.runs.table_fit import likelihood_for


def read_rule(text: str | None) -> Rule | None:
    """Return the rule that the text describes; None stands for the posterior's default."""
    if text is None:
        return None
    rule = grammar.parse(text, "rules")
    if not isinstance(rule, Rule):
        raise InputError(f'\'{text}\' is not a rule; write one such as "magnitude(0.9)" or "log_alpha(3)".')
    return rule


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
