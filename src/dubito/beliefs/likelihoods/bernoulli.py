"""The Bernoulli likelihood, for one or several binary labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, blank, check_rows, diagonal_root, rows
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class Bernoulli(ClassLikelihood):
    r"""Independent binary labels with logits $f$: $\log p(y \mid f) = \sum_l \log \sigma((2y_l - 1) f_l)$.

    Outputs have shape ``[B]``, ``[B, 1]`` or, for several labels, ``[B, L]``; targets are 0 and 1 in the same shape, of
    any type (``[B]`` and ``[B, 1]`` are the same). The Hessian is diagonal, $\sigma(f_l)\,\sigma(-f_l)$. A prediction
    has two classes, 0 and 1; several labels are positions of it: ``[B, L, 2]``.

    >>> Bernoulli().predict(torch.zeros(1)).probs.tolist()
    [[0.5, 0.5]]
    """

    setting_name = "likelihoods.Bernoulli"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are 0 or 1, one per output."""
        logits = self.canonical(outputs)
        plain = targets.byte() if targets.dtype == torch.bool else targets
        check_rows(plain, len(logits), logits.shape[1], "Bernoulli")
        wrong = targets[(targets != 0) & (targets != 1)]
        if len(wrong):
            raise InputError(f"Bernoulli targets must be 0 or 1, got {wrong[0].item()}.")

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the logits as ``[B, L]``."""
        return rows(outputs, "outputs")

    def outputs_for(self, num_targets: int) -> int:
        """Return 1 for two classes."""
        return 1 if num_targets == 2 else num_targets

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability ``[B]``, summed over the labels."""
        logits = self.canonical(outputs)
        signs = 2 * rows(targets, "targets").to(logits.dtype) - 1
        return functional.logsigmoid(signs * logits).sum(dim=-1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $\sigma(f) - y$."""
        logits = self.canonical(outputs)
        return logits.sigmoid() - rows(targets, "targets").to(logits.dtype)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return $\mathrm{diag}(\sigma(f)\,\sigma(-f))$, ``[B, L, L]``."""
        logits = self.canonical(outputs)
        return torch.diag_embed(logits.sigmoid() * (-logits).sigmoid())

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return one column per label, ``[L, B, L]``."""
        logits = self.canonical(outputs)
        log_hessian = functional.logsigmoid(logits) + functional.logsigmoid(-logits)
        return diagonal_root((0.5 * log_hessian).exp())

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels 0 and 1 in the shape and type of the outputs."""
        uniform = blank(outputs, generator).uniform_(generator=generator).to(outputs.device)
        return (uniform < outputs.sigmoid()).to(outputs.dtype)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of the labels 0 and 1, ``[B, 2]``, or ``[B, L, 2]`` of several labels."""
        logits = self.canonical(outputs)
        pairs = torch.stack([torch.zeros_like(logits), logits], dim=-1)
        return pairs.squeeze(1) if logits.shape[1] == 1 else pairs
