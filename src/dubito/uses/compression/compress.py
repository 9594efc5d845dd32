"""Make a smaller network from any posterior with marginals: `compress`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction
from dubito.core import batches, distributed
from dubito.core.batches import Data, Source
from dubito.core.constraints import check
from dubito.core.errors import InputError, MissingDataError
from dubito.core.widest import at_home
from dubito.fitting.checks import outputs_of
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.uses.compression.budget import Budget, Candidate, Meter, search, time_of_call
from dubito.uses.compression.finetune import default_training
from dubito.uses.compression.finetune import finetune as train_on
from dubito.uses.compression.plan import Plan
from dubito.uses.compression.pruner import ANY_NUMBER, Pruner, live_columns, live_features
from dubito.uses.compression.quantize import ROUNDING
from dubito.uses.compression.result import Compression
from dubito.uses.compression.rules import ModelReduction, Rule
from dubito.uses.compression.search import Score, fine_enough, largest_within, score_of
from dubito.uses.compression.weight_statistics import (
    default_rule,
    ranking_rule,
)
from dubito.uses.transfer.distillation import loss_and_data

Structure = Literal["weights", "units", "heads"]
# Rows of the data on which smaller and masked networks are compared and latencies measured.
EXAMPLE_ROWS = 128
# Rows on which the moments of activations are measured.
MEASURED_ROWS = 2048
# The fall of accuracy (for regression, the growth of the RMSE as a fraction) from which a default is questioned.
RUINED = 0.1
# The share of weights from which on the default without data has removed enough.
LITTLE = 0.1
# The fall that the default may cost where it can choose how much to remove.
SPARED = 0.01


@at_home
def compress(
    posterior: Posterior,
    rule: Rule | None = None,
    *,
    budget: Budget | None = None,
    structure: Structure | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    finetune: Data | None = None,
    teacher: Posterior | None = None,
    temperature: float = 1.0,
    training: Training | None = None,
    example: Any = None,
    allow_empty: bool = False,
    generator: torch.Generator | None = None,
) -> Compression:
    """Return a smaller network, without weights or units that the posterior shows to be unneeded.

    The posterior and its network are not changed.

    Args:
        posterior: Any posterior with `marginals()`: variational, Laplace, SWAG, samplers around one mode, a point.
        rule: One of `dubito.rules`; by default the posterior's own: `LogAlpha(3)` under a log-uniform prior, else
            `ModelReduction()`. With `data`, as much is removed by the least posterior damage as costs a hundredth of
            the accuracy (for regression, of the RMSE) on them, if that is more, or if model reduction costs more.
        budget: What the network may cost: `compression.Budget(macs=0.25, error=0.01)`. The amount is searched, and
            units go by their posterior damage per cost (MACs, or bytes for a size). `rule` then only ranks them.
        structure: ``"weights"`` sets single weights to zero, which makes the file small; ``"units"`` removes neurons
            and channels, which also makes the network fast, and by a threshold also input features of tables;
            ``"heads"`` removes attention heads alone. By default weights; units for a budget of operations, time or
            error. Of a network with LoRA adapters only these lose weights, or ranks as their units.
        data: Held-out data with targets: what an accuracy budget is judged on, and by default what `report` and
            `sweep` measure on. With `validation` it is the training data of a budget, used to fine-tune if `training`
            is given.
        validation: Held-out data with targets for a budget, instead of `data`.
        finetune: Training data to train the remaining weights on; without it nothing is trained.
        teacher: A posterior whose predictions replace the targets of `finetune`: it is distilled into the remaining
            weights.
        temperature: Above 1, a classifying teacher's probabilities are softened (`transfer.SoftLabels`).
        training: How to fine-tune; by default three epochs at 1e-4, on small data 1,000 steps at 1e-3.
        example: A batch of inputs, where there is no `data` to take one from; `structure="units"` needs one.
        allow_empty: Whether a layer may lose all of its weights, which leaves a constant network.
        generator: The source of randomness for `rules.Random` and for fine-tuning.

    >>> import dubito
    >>> from dubito import MAP, Training, rules
    >>> digits = dubito.data.load("digits")
    >>> model = dubito.models.mlp(64, 10, hidden=30)
    >>> posterior = MAP().fit(model, digits.train, training=Training(epochs=2), progress=False)
    >>> small = compress(posterior, rules.Magnitude(0.5))
    >>> small.plan.num_kept
    1110
    """
    with distributed.together() if finetune is not None else nullcontext():  # else nothing is exchanged
        if validation is not None:
            finetune, data = data if training is not None and finetune is None else finetune, validation
        structure = _usual_structure(budget) if structure is None else structure
        _check(posterior, structure, rule, budget)
        _check_training(finetune, training, teacher, temperature)
        _check_data(budget, data, finetune)
        allowed = _allowed(rule, budget)
        by_default = rule is None and budget is None
        if rule is None:
            rule = default_rule(posterior) if budget is None else ranking_rule(posterior)
        example = example_inputs(posterior, data, example, structure)
        if example is not None:
            outputs_of(posterior.model, example)
        rows = (
            measured_rows(posterior, data if finetune is None else finetune, example) if structure != "weights" else ()
        )
        pruner = _pruner(posterior, rule, budget, structure, example, allow_empty, generator, rows)
        pruner, rule, rounding, candidates, plan, model = _found(rule, budget, pruner, data, finetune is not None)
        if by_default and data is not None and finetune is None and isinstance(rule, ModelReduction):
            # the evidence judges weights one by one, but they go together, and it may keep nearly all
            judged = compress(
                posterior, ranking_rule(posterior).replace(max_drop=SPARED), structure=structure, data=data,
                example=example, allow_empty=allow_empty, generator=generator,
            )  # fmt: skip
            if judged.plan.sparsity > plan.sparsity or _costs_much(score_of(posterior, data), pruner.center, model):
                return judged
        if finetune is not None:
            taught = Taught(finetune, training, teacher, temperature, generator)
            plan, model = retrained(posterior, plan, model, example, taught)
        elif by_default and data is not None:
            _question(score_of(posterior, data), pruner.center, model, plan)
        elif by_default and isinstance(rule, ModelReduction):
            _question_little(plan)
        made = Compression(posterior, rule, plan, model, pruner, data, example, candidates, rounding)
        if allowed is not None and data is not None:
            made.rounding = fine_enough(made, score_of(posterior, data), allowed)
        return made


def _allowed(rule: Rule | None, budget: Budget | None) -> float | None:
    """Return by how much the error in a file may grow, where that is the only limit of the file."""
    if budget is not None:
        return budget.error if budget.num_bytes is None else None  # a limit of size chooses the rounding itself
    return None if rule is None else rule.max_drop


def _pruner(
    posterior: Posterior,
    rule: Rule,
    budget: Budget | None,
    structure: Structure,
    example: Any,
    allow_empty: bool,
    generator: torch.Generator | None,
    rows: Any,
) -> Pruner:
    """Return what applies the rule; a budget says what units cost and in which multiples they go."""
    cost, blocks, macs, timer = None, ANY_NUMBER, None, None
    if budget is not None:
        cost, blocks, macs = budget.cost, budget.blocks, budget.macs
        timer = partial(time_of_call, budget, example) if budget.times else None
    return Pruner.of(posterior, rule, structure, example, allow_empty, generator, cost, rows, blocks, timer, macs)


def _question_little(plan: Plan) -> None:
    """Warn if the default without data has removed next to nothing."""
    if plan.sparsity < LITTLE:
        warnings.warn(
            f"Model reduction, the default without data, removed only {plan.sparsity:.0%} of the weights: give "
            "held-out data=, on which more is removed as long as it costs no accuracy, or a rule with a target, as "
            "rules.PosteriorDamage(0.8, kind='obs', update=True).",
            stacklevel=3,
        )


@dataclass(frozen=True)
class Taught:
    """What the remaining weights are trained on; see `compress` for each."""

    data: Data
    training: Training | None = None
    teacher: Posterior | None = None
    temperature: float = 1.0
    generator: torch.Generator | None = None


def retrained(
    posterior: Posterior, plan: Plan, model: nn.Module, example: Any, taught: Taught
) -> tuple[Plan, nn.Module]:
    """Return the plan and the network after its remaining weights were trained further."""
    how = taught.training or default_training(taught.data)
    held = live_columns(plan, model, example) if plan.units else plan.keep
    source: tuple[Likelihood, Any, int | None] = (posterior.likelihood, taught.data, None)
    if taught.teacher is not None:
        source = loss_and_data(
            taught.teacher, taught.data, how, taught.temperature, taught.generator, posterior.likelihood
        )
    likelihood, examples, num_data = source
    model = train_on(model, held, examples, likelihood, how, num_data=num_data, generator=taught.generator)
    return replace(plan, inputs=live_features(model, example)), model


def _usual_structure(budget: Any) -> Structure:
    """Return units for a budget of operations, time or error, else weights."""
    return "units" if isinstance(budget, Budget) and budget.cost == "macs" else "weights"


class _Smaller(NamedTuple):
    """A smaller network, and how it was found."""

    pruner: Pruner
    rule: Rule
    rounding: float
    candidates: tuple[Candidate, ...]
    plan: Plan
    model: nn.Module


def _found(rule: Rule, budget: Budget | None, pruner: Pruner, data: Data | None, finetuned: bool) -> _Smaller:
    """Return the network of a rule or budget: of several multiples of units, that with outputs closest to before."""
    several = () if budget is None or not pruner.rows else budget.choices
    best, least = None, math.inf
    for blocks in several or (pruner.blocks,):
        own = replace(pruner, blocks=blocks)
        try:
            amount = _amount(rule, budget, own, data, finetuned)
        except InputError:  # coarse blocks may leave no network that is small enough
            if best is None:
                raise
            continue
        found = _Smaller(own, *amount, *own.at(amount[0]))
        distance = _distance(own, found.model) if len(several) > 1 else 0.0
        if best is None or distance < least:
            best, least = found, distance
    assert best is not None
    return best


@torch.no_grad()
def _distance(pruner: Pruner, small: nn.Module) -> float:
    """Return how far outputs are from those of the large network: their divergence in nats, or the squared distance."""
    total, likelihood = 0.0, pruner.posterior.likelihood
    for inputs in pruner.rows:
        before, after = outputs_of(pruner.center, inputs), outputs_of(small, inputs)
        large = likelihood.predict(before)
        if isinstance(large, ClassPrediction):
            logs = large.log_probs.clamp_min(torch.finfo(before.dtype).min)
            parts = large.probs * (logs - likelihood.predict(after).log_probs)  # type: ignore[attr-defined]
        else:
            parts = (before - after).square()
        total += float(parts.sum())
    return total if math.isfinite(total) else math.inf


def _amount(
    rule: Rule, budget: Budget | None, pruner: Pruner, data: Data | None, finetuned: bool
) -> tuple[Rule, float, tuple[Candidate, ...]]:
    """Return the rule with its amount, the rounding, and the networks that were measured on the way."""
    if budget is not None:
        return _within(budget, pruner, data, finetuned)
    if rule.max_drop is not None:
        if data is None:
            raise MissingDataError(f"{rule!r} decides by held-out data: give `data=`.")
        rule = largest_within(pruner, rule, score_of(pruner.posterior, data))
    return rule, ROUNDING, ()


def _within(
    budget: Budget, pruner: Pruner, data: Data | None, finetuned: bool
) -> tuple[Rule, float, tuple[Candidate, ...]]:
    """Return the rule and the rounding whose network is within a budget, and the networks that were measured."""
    posterior = pruner.posterior
    judged = budget.error is not None or budget.num_bytes is not None  # else shapes are all that matters
    score = score_of(posterior, data) if judged and data is not None else None
    meter = Meter(budget, pruner.center, pruner.example, score)

    def make(rule: Rule) -> Compression:
        return Compression(posterior, rule, *pruner.at(rule, rough=not judged), pruner, data, pruner.example)

    return search(pruner.rule, meter, make, check_error=not finetuned)


def _costs_much(score: Score, dense: nn.Module, model: nn.Module) -> bool:
    """Return whether a smaller network has a score that is lower by more than `SPARED`."""
    before, after = score(dense), score(model)
    return before - after > (SPARED if before >= 0 else SPARED * -before)


def _question(score: Score, dense: nn.Module, model: nn.Module, plan: Plan) -> None:
    """Warn if the default rule removed too much: it ranks weights one by one, but they are removed together."""
    before, after = score(dense), score(model)
    classes = after >= 0  # else it is minus a root mean squared error
    if before - after > (RUINED if classes else RUINED * -before):
        grown = f"by {after / before - 1:.0%}" if before else "from 0"  # a share: targets may be standardised
        cost = f"accuracy went from {before:.3g} to {after:.3g}" if classes else f"RMSE grew {grown}"
        warnings.warn(
            f"{plan.rule!r}, the default here, removed {plan.sparsity:.0%} of the weights, and the {cost} on the data: "
            "fine-tune the rest with finetune=, or limit what is removed, as by rules.PosteriorDamage(0.8, "
            "kind='obs', update=True) or a rule with max_drop=0.01.",
            stacklevel=3,
        )


def _check(posterior: Any, structure: str, rule: Any, budget: Any) -> None:
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"compress takes a posterior, not a {type(posterior).__name__}: give a network's own weights as "
            "MAP(train=False).fit(model, data), or find a posterior around them, as by Laplace().fit(model, data)."
        )
    check("structure", Structure, structure)
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"`budget` must be a compression.Budget, such as Budget(macs=0.25), got {budget!r}.")
    if budget is not None and structure == "weights" and (budget.macs is not None or budget.times):
        raise InputError(f"Removing single weights saves no time: leave out structure='weights' with {budget}.")
    if budget is not None and isinstance(rule, Rule):
        rule.require_no_amount("With a budget")
    if rule is not None and not isinstance(rule, Rule):
        raise InputError(f"`rule` must be one of dubito.rules, such as rules.LogAlpha(3), got {rule!r}.")


def _check_training(finetune: Any, training: Any, teacher: Any, temperature: Any) -> None:
    if isinstance(finetune, Training | int | bool):
        raise InputError(f"`finetune` must be training data, got {finetune!r}: give training=Training(...) too.")
    if teacher is not None and not isinstance(teacher, Posterior):
        raise InputError(
            f"`teacher` must be a posterior, such as that of MAP(train=False), got a {type(teacher).__name__}."
        )
    if teacher is not None and finetune is None:
        raise InputError("A teacher predicts on training data: give its inputs as finetune=.")
    check("temperature", float, temperature)
    if teacher is None and temperature != 1:
        raise InputError(f"`temperature` is for a teacher, got {temperature} without one: give teacher= too.")
    if finetune is None and training is not None:
        raise InputError("`training` says how to fine-tune: give the training data as finetune= too.")


def _check_data(budget: Budget | None, data: Data | None, finetune: Data | None) -> None:
    """Raise if an error cannot be judged, or data in memory hold NaN in rows that only `report` would read."""
    if budget is not None and budget.error is not None and data is None:
        raise MissingDataError(
            "An error budget is judged on held-out data with targets: give `validation=` or `data=`."
        )
    for given in (data, finetune):
        held = None if given is None else Source(given, must_count=False, shard=False).in_memory
        for part in held or ():
            _check_finite(batches.as_tensors(batches.split(part)[0]))


def _check_finite(inputs: Any) -> None:
    if not batches.is_finite(inputs):
        raise InputError("The inputs hold NaN or infinite values: clean or impute them first.")


def measured_rows(posterior: Posterior, data: Data | None, example: Any) -> Iterator[Any]:
    """Yield batches of inputs on which activations are measured."""
    if data is None:
        yield example
        return
    source = Source(data, batch_size=EXAMPLE_ROWS, must_count=False, shard=False)
    rows = 0
    for batch in source.spread(MEASURED_ROWS) if source.num_data else source.replay():
        _check_finite(batch.inputs)
        yield batches.place(batch.inputs, posterior.device, posterior.dtype)
        rows += batch.num_rows
        if rows >= MEASURED_ROWS:
            return


def example_inputs(posterior: Posterior, data: Data | None, example: Any, structure: str) -> Any:
    """Return a few inputs on the device of the model; None if there are none."""
    if example is None and data is not None:
        source = Source(data, batch_size=EXAMPLE_ROWS, must_count=False, shard=False)
        example = source.first().inputs
    if example is None:
        if structure != "weights":
            raise InputError(f'structure="{structure}" needs one batch of inputs: give `data=` or `example=`.')
        return None
    rows = batches.take(batches.as_tensors(example), slice(0, EXAMPLE_ROWS))
    return batches.place(rows, posterior.device, posterior.dtype)
