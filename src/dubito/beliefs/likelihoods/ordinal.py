"""The likelihood of ordered classes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, blank, diagonal_root
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class Ordinal(ClassLikelihood):
    r"""Classes 0 < 1 < … < C − 1, as steps that are taken one after the other (the continuation-ratio model).

    The network has C − 1 outputs ``[B, C − 1]``, the logits of going on from one class to the next:

    $$P(y > j \mid y \ge j) = \sigma(f_j), \qquad
      \log p(y \mid f) = \sum_{j < y} \log\sigma(f_j) + [y < C - 1] \log\sigma(-f_y)$$

    Any outputs give valid probabilities, without thresholds to be kept in order (Tutz 1991; as a loss, Shi et al. 2021,
    https://arxiv.org/abs/2111.08851). The Hessian is diagonal and depends on the target, because steps after it say
    nothing; `hessian` is its expectation, $P(y \ge j)\,\sigma(f_j)\,\sigma(-f_j)$.

    >>> Ordinal().predict(torch.zeros(1, 2)).probs.tolist()
    [[0.5, 0.25, 0.25]]
    """

    setting_name = "likelihoods.Ordinal"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are whole numbers from 0 to the number of outputs."""
        steps = self.canonical(outputs)
        if tuple(targets.shape) != (len(steps),):
            raise InputError(f"Ordinal targets must have shape ({len(steps)},), got {tuple(targets.shape)}.")
        if targets.is_floating_point() or targets.is_complex():
            raise InputError(f"Ordinal targets must be whole numbers, not {targets.dtype}: use targets.long().")
        wrong = targets[(targets < 0) | (targets > steps.shape[1])]
        if len(wrong):
            raise InputError(
                f"The class {wrong[0].item()} is not one of 0 to {steps.shape[1]}, which {steps.shape[1]} outputs "
                "tell apart."
            )

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs, which are ``[B, C − 1]``."""
        if outputs.ndim != 2:
            raise InputError(
                f"Ordinal needs outputs [B, C - 1], one for each step to the next class, got {tuple(outputs.shape)}."
            )
        return outputs

    def outputs_for(self, num_targets: int) -> int:
        """Return the number of steps between so many classes."""
        return num_targets - 1

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability of the class ``[B]``."""
        return self.logits(outputs).gather(1, targets.long().unsqueeze(1)).squeeze(1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $[j \le y]\,(\sigma(f_j) - [j < y])$."""
        steps = self.canonical(outputs)
        numbers, labels = torch.arange(steps.shape[1], device=steps.device), targets.unsqueeze(1)
        return torch.where(numbers <= labels, steps.sigmoid() - (numbers < labels).to(steps.dtype), 0.0)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the expected Hessian $\mathrm{diag}(P(y \ge j)\,\sigma(f_j)\,\sigma(-f_j))$."""
        return torch.diag_embed(self._log_fisher(outputs).exp())

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return one column per step, ``[C - 1, B, C - 1]``."""
        return diagonal_root((0.5 * self._log_fisher(outputs)).exp())

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw classes ``[B]``: go on until a step fails."""
        steps = self.canonical(outputs)
        uniform = blank(steps, generator).uniform_(generator=generator).to(steps.device)
        return (uniform < steps.sigmoid()).long().cumprod(dim=1).sum(dim=1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of all classes, ``[B, C]``."""
        return _log_probs(self.canonical(outputs))

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Ordinal]:
        r"""Return the steps of the class probabilities $p_c^{1/T} / \sum_k p_k^{1/T}$, whose ranking is the same.

        Steps divided by T would have another most probable class: each would come nearer to a coin that is tossed.
        """
        check("temperature", Positive, temperature)
        classes = _log_probs(outputs) / temperature
        numbers = torch.arange(classes.shape[-1], device=outputs.device)
        later = torch.where(numbers > numbers[:-1, None], classes.unsqueeze(-2), -math.inf)
        return later.logsumexp(dim=-1) - classes[..., :-1], self

    def _log_fisher(self, outputs: Tensor) -> Tensor:
        steps = self.canonical(outputs)
        on = functional.logsigmoid(steps)
        return functional.pad(on.cumsum(dim=-1)[:, :-1], (1, 0)) + on + functional.logsigmoid(-steps)


def _log_probs(steps: Tensor) -> Tensor:
    """Return the log-probabilities ``[..., C]`` of all classes."""
    reached = functional.pad(functional.logsigmoid(steps).cumsum(dim=-1), (1, 0))
    return reached + functional.pad(functional.logsigmoid(-steps), (0, 1))
