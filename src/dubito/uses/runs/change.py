"""Change a run: learn from more rows, or make its network smaller. Each gives a new run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data import DataSet, Pair, Table
from dubito.data.source import carve
from dubito.data.tables import as_table, with_target
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.uses.compression import Compression, compress
from dubito.uses.compression.rules import Rule
from dubito.uses.compression.weight_statistics import default_rule, has_weight_variances
from dubito.uses.reporting import evaluate
from dubito.uses.runs.default import LAPLACE
from dubito.uses.runs.guard import GuardedPosterior
from dubito.uses.runs.run import TableRun, Texts, calibrated
from dubito.uses.runs.table_fit import HELD_OUT, sample_rows, take_rows, take_texts

# By how much the NLL of the old held-out rows may grow in an update before it is questioned, in nats.
WORSE = 0.1
# With fewer new rows none is held out: the calibration stays on the old ones.
FEWEST_NEW = 10


def update(
    run: TableRun,
    table: Any,
    *,
    training: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TableRun:
    """Return the run after more rows: its posterior is the prior for them, and a fifth of them joins the held-out rows.

    The encoder stays: a category that the first rows did not have is still unseen.

    Args:
        run: The run; it is not changed.
        table: Rows with the target column.
        training: Training settings, for posteriors that are updated by training.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    rows = with_target(as_table(table), run.target)
    inputs, targets = run.encoder.encode(rows), run.encoder.encode_targets(rows)
    kept, others = np.arange(len(rows)), np.arange(0)
    if len(rows) >= FEWEST_NEW:
        kept, others = carve(len(rows), validation=HELD_OUT, generator=torch.Generator().manual_seed(seed))
    posterior = run.posterior.update(
        (inputs[kept], targets[kept]),
        training=None if training is None else Training(**training),
        generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )
    old = run.parts["held_out"]
    held_out = tuple(torch.cat([one, new[others]]) for one, new in zip(old, (inputs, targets), strict=True))
    parts: dict[str, Pair] = {**run.parts, "held_out": (held_out[0], held_out[1])}
    texts = _joined_texts(run, rows, {"held_out": others, "train": kept})
    if "train" in parts:
        seen = tuple(torch.cat([one, new[kept]]) for one, new in zip(parts["train"], (inputs, targets), strict=True))
        chosen = sample_rows(len(seen[1]), seed)
        parts["train"], texts["train"] = take_rows((seen[0], seen[1]), chosen), take_texts(texts["train"], chosen)
    updates = [*run.settings.get("updates", []), {"rows": len(kept), "held_out": len(others)}]
    settings = {**run.settings, "updates": updates}
    new = replace(calibrated(posterior, run.encoder.widened(rows), run.network, parts, settings), texts=texts)
    _warn_if_worse(run, new)
    return new


def _joined_texts(run: TableRun, rows: Table, chosen: Mapping[str, NDArray[Any]]) -> dict[str, Texts]:
    """Return the texts of each part of the run, followed by those of its new rows."""
    new = run.encoder.texts_of(rows)
    return {
        part: {name: [*run.texts[part][name], *take_texts(new, torch.from_numpy(places))[name]] for name in new}
        for part, places in chosen.items()
    }


def _warn_if_worse(run: TableRun, new: TableRun) -> None:
    """Warn if an update made the predictions for the old held-out rows much worse."""
    before, after = (
        evaluate(each.posterior, run.parts["held_out"], target_scale=each.target_scale).scores["nll"]
        for each in (run, new)
    )
    if not after <= before + WORSE:
        warnings.warn(
            f"After the update the old held-out rows are predicted worse (NLL {after:.4g}, before {before:.4g}): the "
            "new rows may hold errors, or other data than the first ones.",
            stacklevel=3,
        )


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
    at_most: float,
    *,
    rule: Rule | None = None,
    structure: str = "units",
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
        rule: Which weights go first; by default the posterior's own rule.
        structure: ``"units"`` removes neurons, which makes the network small and fast; ``"weights"`` single weights.
        recipe: Finds the posterior over what is left.
        finetune: Epochs of training after the removal.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    if not 0 <= at_most < 1:
        raise InputError(f"`at_most` must be a fraction from 0 to below 1, got {at_most}.")
    generator = torch.Generator().manual_seed(seed)
    inside = _with_weight_variances(run.unguarded, dataset, generator, progress)
    rule = (rule or default_rule(inside)).replace(max_drop=at_most, threshold=None, target=None)
    options: dict[str, Any] = {"data": _seen_rows(dataset), "structure": structure}
    if finetune:
        options |= {"finetune": dataset.train, "training": Training(epochs=finetune, lr=1e-3, schedule="linear")}
    made = compress(inside, rule, **options, generator=generator)
    posterior = made.posterior(
        recipe or LAPLACE, dataset.train, validation=dataset.validation, generator=generator,
        progress=progress,
    )  # fmt: skip
    settings = {**run.settings, "compressed": repr(made.rule), "name": f"{run.settings.get('name')}, compressed"}
    if isinstance(run.posterior, GuardedPosterior):
        posterior = GuardedPosterior(posterior, run.posterior.known)
    return replace(calibrated(posterior, run.encoder, run.network, run.parts, settings), texts=run.texts), made
