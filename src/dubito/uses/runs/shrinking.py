"""Make the network of a run smaller: by an error that it may cost, or one of twenty candidates."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal

import torch

import dubito
from dubito.core.constraints import Share, check
from dubito.core.errors import InputError
from dubito.data import DataSet, Pair, TableTransform
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.uses.compression import Compression, Exploration, compress, explore, pick
from dubito.uses.compression.rules import Rule
from dubito.uses.compression.weight_statistics import default_rule, has_weight_variances
from dubito.uses.runs.default import LAPLACE
from dubito.uses.runs.guard import GuardedPosterior
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.run import TableRun, calibrated
from dubito.uses.runs.table_fit import kept_rows


def _seen_rows(dataset: DataSet) -> Pair:
    """Return the training and validation rows: many, so that a small budget is not decided by a few of them."""
    parts = [dataset.train, *([dataset.validation] if dataset.validation else [])]
    inputs, targets = (torch.cat([part[place] for part in parts]) for place in (0, 1))
    return inputs, targets


def _with_weight_variances(
    posterior: Posterior, dataset: DataSet, generator: torch.Generator, progress: bool
) -> Posterior:
    """Return the posterior, or a Laplace posterior of its network if it does not say which weights can be dropped."""
    if has_weight_variances(posterior):
        return posterior
    what = "the first network of the ensemble" if hasattr(posterior, "members") else "the network"
    warnings.warn(
        f"The {posterior.family} posterior of this run does not say which weights can be dropped: {what} is "
        f"compressed, by a posterior {LAPLACE!r} of it.",
        stacklevel=3,
    )
    return LAPLACE.fit(
        posterior.model, dataset.train, likelihood=posterior.likelihood, validation=dataset.validation,
        generator=generator, progress=progress,
    )  # fmt: skip


def compressed(
    run: TableRun,
    dataset: DataSet,
    at_most: float = 0.005,
    *,
    candidate: int | None = None,
    rule: Rule | None = None,
    structure: Literal["weights", "units"] = "units",
    recipe: Recipe | None = None,
    finetune: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> tuple[TableRun, Compression]:
    """Return a run with a smaller network and a posterior over the weights that are left, and the compression.

    Args:
        run: The run; it is not changed.
        dataset: The table that the run was fitted to, loaded in the same way; see `training_rows`.
        at_most: How much accuracy may be lost on the training and validation rows; for numbers, how much the root mean
            squared error may grow as a fraction of itself. The held-out rows only score the result.
        candidate: Instead, the number of a candidate of `explored`.
        rule: Which weights go first; by default the posterior's own rule.
        structure: ``"units"`` removes neurons, which makes the network small and fast; ``"weights"`` single weights.
        recipe: Finds the posterior over what is left.
        finetune: Epochs of training after the removal.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    check("at_most", Share, at_most)
    generator = torch.Generator().manual_seed(seed)
    inside = _with_weight_variances(run.unguarded, dataset, generator, progress)
    options: dict[str, Any] = {"generator": generator}
    if finetune:
        options |= {"finetune": dataset.train, "training": Training(epochs=finetune, lr=1e-3, schedule="linear")}
    if candidate is None:
        rule = (rule or default_rule(inside)).replace(max_drop=at_most, threshold=None, target=None)
        made = compress(inside, rule, data=_seen_rows(dataset), structure=structure, **options)
    else:
        made = pick(inside, candidate, rule, data=_choosing_rows(dataset), train=dataset.train, **options)
    posterior = made.posterior(
        recipe or LAPLACE, dataset.train, validation=dataset.validation, generator=generator,
        progress=progress,
    )  # fmt: skip
    settings = {**run.settings, "compressed": repr(made.rule), "name": f"{run.settings.get('name')}, compressed"}
    if isinstance(run.posterior, GuardedPosterior):
        posterior = GuardedPosterior(posterior, run.posterior.known)
    return replace(calibrated(posterior, run.encoder, run.network, run.parts, settings), texts=run.texts), made


def run_of(made: Compression, dataset: DataSet, network: str, *, seed: int = 0, progress: bool = True) -> TableRun:
    """Return the run of a network that was compressed on its own, with a posterior over the weights that are left.

    Args:
        made: The compression of a network that was trained on the table.
        dataset: The table.
        network: How the network before was built, by name.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    encoder = dataset.encoder
    if not isinstance(encoder, TableTransform):
        raise InputError(f"A run predicts rows of tables, and {dataset.name} is none: save the network alone.")
    posterior = made.posterior(
        LAPLACE, dataset.train, validation=dataset.validation, generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )  # fmt: skip
    parts, texts = kept_rows(dataset, seed)
    settings = {
        "dubito": dubito.__version__, "name": f"{made.source.recipe!r}, compressed", "recipe": repr(LAPLACE),
        "likelihood": repr(posterior.likelihood), "compressed": repr(made.rule), "seed": seed, "table": dataset.name,
    }  # fmt: skip
    source = NetworkSource.of(network, dataset, made.source.likelihood)
    return replace(calibrated(posterior, encoder, source, parts, settings), texts=texts)


def explored(
    run: TableRun,
    dataset: DataSet,
    *,
    rule: Rule | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Exploration:
    """Return twenty smaller networks, each measured with a posterior over the weights that are left; see `explore`.

    They are scored on the validation rows, so that the held-out rows can score the one that is chosen; if there are no
    validation rows, on the held-out rows.

    Args:
        run: The run; it is not changed.
        dataset: The table that the run was fitted to, loaded in the same way.
        rule: Which weights go first, without an amount.
        recipe: Finds the posterior over what is left.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    generator = torch.Generator().manual_seed(seed)
    inside = _with_weight_variances(run.unguarded, dataset, generator, progress)
    return explore(
        inside, rule, data=_choosing_rows(dataset), train=dataset.train, recipe=recipe or LAPLACE,
        validation=dataset.validation, target_scale=dataset.target_scale, generator=generator, progress=progress,
    )  # fmt: skip


def _choosing_rows(dataset: DataSet) -> Pair:
    """Return the rows on which candidates are compared."""
    return dataset.validation or dataset.test
