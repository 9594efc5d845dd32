"""Recognize causal language models, whose logits at a position are for the label at the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import batches, params
from dubito.core.batches import Batch
from dubito.core.once import warn_once

# Examples with which the model's own loss is compared, and the relative difference that counts as rounding.
TRIED, TOLERANCE = 8, 1e-3
# Of the labels that are tokens of the inputs at a certain place, more than this fraction show where labels belong.
MOSTLY = 0.9


def with_next_token(likelihood: Likelihood, model: nn.Module, first: Callable[[], Batch]) -> Likelihood:
    """Return a categorical likelihood that compares each position with the next label, if the model is made for that.

    Hugging Face models shift the labels inside their own loss, so their labels are the inputs themselves. Whether this
    model does is seen by comparing its loss on one batch with the two candidates, or else by its class. Labels that the
    user has shifted already are left alone.
    """
    if not isinstance(likelihood, Categorical) or likelihood.next_token != "auto":
        return likelihood
    if not hasattr(model, "config"):  # not a Hugging Face model
        return likelihood
    batch = first()
    inputs, targets = (batches.take(part, slice(0, TRIED)) for part in (batch.inputs, batch.targets))
    if targets.ndim != 2 or targets.shape[1] < 2 or not _shifts(model, inputs, targets, likelihood):
        return likelihood
    if _is_shifted(inputs, targets, likelihood):
        return likelihood
    warn_once(
        "This is a causal language model: the logits at each position are compared with the label at the next one, as "
        "the model's own loss does. likelihoods.Categorical(next_token=True) says so yourself, and next_token=False "
        "compares them with the label at the same position."
    )
    return likelihood.replace(next_token=True)


def _shifts(model: nn.Module, inputs: Any, targets: Tensor, likelihood: Categorical) -> bool:
    """Return whether the model's own loss compares logits with the next labels."""
    outputs, loss = _own_loss(model, inputs, targets)
    if outputs is not None and loss is not None:
        same, following = (
            -float(likelihood.replace(next_token=shifted).log_prob(outputs, targets).double().sum())
            / max(int(likelihood.replace(next_token=shifted).observed(targets).sum()), 1)
            for shifted in (False, True)
        )
        errors = abs(loss - same), abs(loss - following)
        if min(errors) <= min(TOLERANCE * abs(loss), 0.1 * max(errors)):  # not both alike, as in an untrained network
            return errors[1] < errors[0]
    plain = getattr(model, "get_base_model", lambda: model)()  # without adapters
    return getattr(plain, "loss_type", None) == "ForCausalLM" or type(plain).__name__.endswith(
        ("ForCausalLM", "LMHeadModel")
    )


@torch.no_grad()
def _own_loss(model: nn.Module, inputs: Any, targets: Tensor) -> tuple[Tensor | None, float | None]:
    """Return the logits and the loss that the model gives for labels; None where it takes no labels."""
    modes = {module: module.training for module in model.modules()}
    copied = batches.map_leaves(torch.clone, inputs)
    try:
        model.eval()
        if isinstance(copied, Mapping):
            found = model(**copied, labels=targets)
        else:
            found = model(*(copied if isinstance(copied, tuple) else (copied,)), labels=targets)
        return params.logits_of(found), float(found.loss)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # it takes no such labels
        return None, None
    finally:
        for module, mode in modes.items():
            module.training = mode


def _is_shifted(inputs: Any, targets: Tensor, likelihood: Categorical) -> bool:
    """Return whether the labels are the inputs one position later: the user has shifted them."""
    for leaf in batches.leaves(inputs):
        if leaf.shape == targets.shape and not leaf.is_floating_point():
            observed = likelihood.observed(targets)
            here = (targets == leaf)[observed].double().mean()
            following = (targets[:, :-1] == leaf[:, 1:])[observed[:, :-1]].double().mean()
            if following > MOSTLY and following > here:
                return True
    return False
