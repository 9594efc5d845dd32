"""Hold out examples: the splits on which `Auto` compares its candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dubito.core.batches import Data, Source
from dubito.core.errors import InputError
from dubito.core.randomness import derive_seed
from dubito.core.subsets import fold_numbers, num_examples, subset
from dubito.fitting.automatic import ENOUGH, FOLDS

# Fewer held-out examples than this cannot tell candidates apart.
FEWEST = 20


class Split(NamedTuple):
    """One way to hold out examples.

    Attributes:
        data: What a candidate is fitted to.
        validation: Its validation data, or None.
        held_out: The examples that it then predicts.
        label: A short name.
    """

    data: Data
    validation: Data | None
    held_out: Data
    label: str


class HeldOut(NamedTuple):
    """All splits, and where their held-out examples come from, in words.

    `one_network` says that all splits have the same training data, so that one network serves them all.
    """

    splits: tuple[Split, ...]
    words: str
    one_network: bool


def hold_out(data: Data, validation: Data | None, *, trained: bool, seed: int) -> HeldOut:
    """Return the splits.

    Args:
        data: The training data.
        validation: The validation data, or None.
        trained: Whether the network was trained on the data already, so that none of it can be held out.
        seed: Determines which examples are held out.
    """
    given, size = 0 if validation is None else _count(validation), num_examples(data)
    if given >= ENOUGH or (given >= FEWEST and (trained or size is None)):
        assert validation is not None
        order = torch.randperm(given, generator=torch.Generator().manual_seed(derive_seed(seed, "halves")))
        halves = [_subset(validation, order[start::2].sort().values) for start in range(2)]
        splits = tuple(Split(data, halves[1 - k], halves[k], f"half-{k}") for k in range(2))
        return HeldOut(splits, "the validation data", True)
    if trained or size is None or size < FEWEST:
        why = (
            "the network is trained already" if trained
            else "its examples cannot be chosen one by one" if size is None
            else f"there {'is' if size == 1 else 'are'} only {size} example{'' if size == 1 else 's'}"
        )  # fmt: skip
        raise InputError(
            f"Auto needs examples that the network was not trained on, and cannot take them from the training data "
            f"({why}): pass at least {FEWEST} examples as validation=, or choose a recipe yourself."
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "folds")))
    folds, fold = 1 if size >= FOLDS * ENOUGH else FOLDS, fold_numbers(data, order, FOLDS)
    splits = tuple(
        Split(
            subset(data, order[fold != number].sort().values),
            validation, subset(data, order[fold == number].sort().values, shuffle=False), f"fold-{number}",
        )
        for number in range(folds)
    )  # fmt: skip
    return HeldOut(splits, "a fifth of the training data" if folds == 1 else f"{FOLDS}-fold cross-validation", False)


def _count(validation: Data) -> int:
    size = num_examples(validation)
    return Source(validation).num_data if size is None else size


def _subset(validation: Data, rows: torch.Tensor) -> Data:
    if num_examples(validation) is not None:
        return subset(validation, rows, shuffle=False)
    raise InputError("Auto divides the validation data in two: give them as a pair of tensors or a Dataset.")
