"""Parts of the data: does an interval hold the truth, and is an answer right, in every part as often as it should?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dubito.core import distributed
from dubito.core.errors import InputError
from dubito.uses.reporting.collect import Vectors
from dubito.uses.reporting.evaluation import GroupScores

LEVEL = 0.9  # of the intervals whose coverage is compared
MOST = 12  # groups of one kind that are shown
UNCERTAINTY = "Predicted uncertainty"
QUARTERS = ("smallest quarter", "second quarter", "third quarter", "largest quarter")


def group_scores(vectors: Vectors, groups: Mapping[str, Sequence[Any] | Tensor] | None) -> dict[str, GroupScores]:
    """Return the scores by group: of the groups that are given, and by what was predicted.

    Args:
        vectors: One number per datum, as `collect` returns them.
        groups: For each kind of group one label per datum, in the order of the data.
    """
    if groups and distributed.is_active():
        raise InputError("`groups` is for one process: evaluate the groups without torch.distributed.")
    if len(vectors.get("answer", ())) != len(vectors["loss"]):
        if groups:
            raise InputError("`groups` needs one target per example, but these data have several: leave it out.")
        return {}
    claimed, observed = claimed_and_observed(vectors)
    found = {}
    for name, labels in (groups or {}).items():
        texts = [_text(label) for label in (labels.tolist() if isinstance(labels, Tensor) else labels)]
        if len(texts) != len(observed):
            raise InputError(
                f"The groups '{name}' are {len(texts)} labels for {len(observed)} examples: give one each."
            )
        found[name] = by_group(texts, claimed, observed)
    own = quarters(vectors["stddev"]) if "stddev" in vectors else []
    if len(set(own)) > 1:
        found[UNCERTAINTY] = by_group(own, claimed, observed, QUARTERS)
    return found


def claimed_and_observed(vectors: Vectors) -> tuple[Tensor, Tensor]:
    """Return for each datum what was claimed, the confidence or the level of the interval, and whether it came true."""
    if "stddev" in vectors:
        covered = (vectors["pit"] - 0.5).abs() <= LEVEL / 2
        return torch.full((len(covered),), LEVEL, dtype=torch.float64), covered.double()
    return 1 - vectors["max-probability"].double(), 1 - vectors["loss"].double()


def by_group(
    labels: Sequence[str], claimed: Tensor, observed: Tensor, order: Sequence[str] | None = None
) -> GroupScores:
    """Return count, mean claim and mean outcome of each group; the rarest of many groups are put together.

    >>> found = by_group(["a", "b", "a"], torch.full((3,), 0.9), torch.tensor([1.0, 1.0, 0.0]))
    >>> found.labels, found.counts, found.observed
    (('a', 'b'), (2.0, 1.0), (0.5, 1.0))
    """
    counts: dict[str, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    if order is None:
        common = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
        kept = sorted(common[: MOST - 1] if len(common) > MOST else common)
        order = (*kept, "all others") if len(common) > MOST else kept
        labels = [label if label in set(kept) else "all others" for label in labels]
    places = {label: place for place, label in enumerate(order)}
    index = torch.tensor([places[label] for label in labels])
    sums = torch.zeros(3, len(order), dtype=torch.float64)
    for row, values in zip(sums, (torch.ones(len(labels)), claimed, observed), strict=True):
        row.index_add_(0, index, values.double())
    shown = sums[0] > 0
    number, claims, outcomes = (row[shown] for row in sums)
    names = tuple(label for label, is_shown in zip(order, shown.tolist(), strict=True) if is_shown)
    return GroupScores(names, *(tuple(row.tolist()) for row in (number, claims / number, outcomes / number)))


def quarters(values: Tensor) -> list[str]:
    """Return for each value the quarter of all values that it belongs to; equal values belong to the same."""
    ordered = values.double().sort().values
    cuts = ordered[[len(ordered) * part // 4 for part in (1, 2, 3)]]
    return [QUARTERS[place] for place in torch.bucketize(values.double(), cuts, right=True).tolist()]


def wilson(share: float, count: float, z: float = 2.0) -> tuple[float, float]:
    """Return the interval of a share that was seen in `count` cases, by Wilson's method at `z` standard errors.

    >>> low, high = wilson(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.402, 0.598)
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _text(label: Any) -> str:
    return f"{label:g}" if isinstance(label, float) else str(label)
