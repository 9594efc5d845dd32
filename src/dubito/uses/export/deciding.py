"""The decisions inside a file, and the random draws that they were fitted with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.fitting.posterior import Posterior
from dubito.uses.decisions import ConformalIntervals, ConformalSets, Detector, Rejector
from dubito.uses.export.outputs import Decisions


class Draws(NamedTuple):
    """The posterior samples in a file: how many, and from which state of a generator."""

    num_samples: int
    state: torch.Generator

    def generator(self) -> torch.Generator:
        """Return a new generator in that state."""
        return self.state.clone_state()


def fit_decisions(
    posterior: Posterior, outputs: Sequence[str] | None, given: Sequence[Any], calibration: Any, draws: dict[str, Any]
) -> list[Any]:
    """Fit the decisions that `outputs` ask for and that are not given, with their default settings."""
    if calibration is None:
        return []
    kinds: dict[str, Any] = {"answer": Rejector, "unfamiliar": Detector, "set": ConformalSets}
    kinds |= {"lower": ConformalIntervals, "upper": ConformalIntervals}
    wanted = dict.fromkeys(kinds[name] for name in outputs or () if name in kinds)
    present = {type(one) for one in given}
    return [kind(posterior, calibration, **draws) for kind in wanted if kind not in present]


def find_draws(
    posterior: Posterior, decisions: Decisions, num_samples: int | None, generator: torch.Generator | None
) -> Draws:
    """Return the draws of the file: those that its decisions were fitted with, if there are any."""
    own = Draws(posterior.default_samples if num_samples is None else num_samples, _state(generator))
    first: Draws | None = None
    for one in decisions.found.values():
        name = type(one).__name__
        if one.posterior is not posterior and one.posterior.digest() != posterior.digest():
            raise InputError(f"The {name} was fitted with another posterior: fit it with the one that is exported.")
        fixed = one.draws
        count = posterior.default_samples if fixed.num_samples is None else fixed.num_samples
        found = Draws(count, fixed.state)
        wanted = first or Draws(found.num_samples if num_samples is None else num_samples,
                                found.state if generator is None else own.state)  # fmt: skip
        if count != wanted.num_samples or not torch.equal(found.state.get_state(), wanted.state.get_state()):
            raise InputError(
                f"The {name} was fitted with other posterior samples ({count}) than the file is to hold "
                f"({wanted.num_samples}): give both the same num_samples and generator."
            )
        first = found
    return first or own


def _state(generator: torch.Generator | None) -> torch.Generator:
    return default_generator(generator).clone_state()
