r"""Conformal prediction that follows a drift: the level moves after each datum whose truth becomes known.

$$\alpha_{t+1} = \alpha_t + \gamma\,(\alpha - e_t), \qquad e_t = [\text{datum } t \text{ was not covered}]$$

Whatever the data do, the share of covered data after T of them differs from the wanted coverage by at most
$(\max(\alpha, 1 - \alpha) + \gamma) / (T\,\gamma)$ (adaptive conformal inference; Gibbs & Candès 2021,
https://arxiv.org/abs/2106.00170).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dubito.core import batches
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, CountOrZero, OpenProbability
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses.decisions.calibration_scores import CalibrationScores
from dubito.uses.decisions.conformal import Conformal, ConformalIntervals, ConformalSets


class OnlineConformal(DecisionRule):
    """Sets or intervals whose size adapts while the truth of earlier data becomes known.

    It does not change: `observed` returns a new one.

    Args:
        conformal: Sets or intervals, without groups and weights; several outputs need ``joint=True``.
        rate: γ, how fast the level moves. The coverage over the last 1/γ data or so is close to the wanted one.
        window: How many of the latest scores are kept; as many as there were calibration data if None.

    Attributes:
        level: The coverage that is aimed at now; it may leave [0, 1], where sets are empty, or hold everything.
        num_observed: How many data were observed.
        num_covered: How many of them were covered.
    """

    saved: ClassVar[Mapping[str, Any]] = {
        "rate": OpenProbability, "window": Count, "level": float, "num_observed": CountOrZero,
        "num_covered": CountOrZero,
    }  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        conformal: ConformalSets | ConformalIntervals,
        *,
        rate: OpenProbability = 0.01,
        window: Count | None = None,
    ) -> None:
        scores = conformal.calibration
        if scores.groups is not None or scores.weights is not None:
            raise UnsupportedError("Online conformal prediction takes no groups and no weights: leave them out.")
        if scores.scores.shape[1] > 1:
            raise UnsupportedError("Online conformal prediction needs one coverage for all outputs: use joint=True.")
        self.posterior, self.conformal, self.rate = conformal.posterior, conformal, rate
        self.window = len(scores.scores) if window is None else window
        self.level, self.num_observed, self.num_covered = conformal.coverage, 0, 0
        self.scores = scores.scores[:, 0][-self.window :]

    @property
    def coverage(self) -> float | None:
        """The share of observed data that was covered; None before the first."""
        return self.num_covered / self.num_observed if self.num_observed else None

    def predict(self, x: Any) -> Any:
        """Return the sets ``[B, C]`` or the ends ``[B, O]`` at the present level; `x` is what the posterior takes."""
        threshold, found = self._threshold(), self.conformal.draws.predict(x)
        if isinstance(self.conformal, ConformalSets):
            return self.conformal.nonconformity(found) <= threshold
        return self.conformal._ends(found, threshold)

    def observed(self, x: Any, targets: Any) -> OnlineConformal:
        """Return the rule after data whose truth is known, one after the other in their order."""
        targets = torch.as_tensor(targets).to(self.posterior.device)
        if len(targets) != (rows := batches.num_rows(batches.as_tensors(x))):
            raise InputError(f"There are {len(targets)} targets for {rows} inputs: give one target for each input.")
        new = copy.copy(self)
        for score in self.conformal.labelled_scores(x, targets):
            covered = bool(score <= new._threshold())
            new.level += new.rate * (self.conformal.coverage - covered)
            new.num_observed, new.num_covered = new.num_observed + 1, new.num_covered + covered
            new.scores = torch.cat([new.scores, score[None]])[-new.window :]
        return new

    def _threshold(self) -> Tensor:
        return CalibrationScores(self.scores[:, None]).threshold(self.level)

    def state(self) -> dict[str, Any]:
        """Return the state of the rule inside, and what was observed."""
        inside = {"rule": type(self.conformal).__name__, "state": self.conformal.state()}
        return {"inside": inside, "scores": self.scores, **self.saved_values()}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        kinds: dict[str, Any] = {"ConformalSets": ConformalSets, "ConformalIntervals": ConformalIntervals}
        inside: Conformal = kinds[state["inside"]["rule"]].from_state(posterior, state["inside"]["state"])
        found = cls.with_saved(posterior, state)
        found.conformal = inside
        found.scores = state["scores"].double().to(posterior.device)
        return found

    def __repr__(self) -> str:
        seen = f"{self.num_covered} of {self.num_observed} covered" if self.num_observed else "nothing observed"
        return f"<OnlineConformal: coverage {self.conformal.coverage:g}, now aims at {self.level:.4g}, {seen}>"
