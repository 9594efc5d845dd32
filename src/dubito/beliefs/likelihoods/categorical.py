"""The categorical likelihood, for one of C classes at one or several positions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, blank
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class Categorical(ClassLikelihood):
    r"""Softmax classification, $\log p(y \mid f) = f_y - \log \sum_c e^{f_c}$.

    The layout of the logits follows from their number of axes:

    - ``[B, C]``: one label per datum ``[B]``;
    - ``[B, T, C]``: a sequence, class axis last (as transformers give it), labels ``[B, T]``;
    - ``[B, C, H, W]`` and more axes: class axis second (torch's convention for segmentation), labels ``[B, H, W]``.

    With $p$ the softmax, the Hessian is $\mathrm{diag}(p) - p p^\top$; its root is a Cholesky factor in closed form.

    Args:
        ignore_index: The label of positions to ignore (padding): they add no likelihood, gradient or curvature.
        next_token: Whether the logits at a position are for the label at the next one, as those of causal language
            models, whose labels are their inputs; the last position then has no label. ``"auto"`` is False until a fit
            recognizes such a model.

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """

    setting_name = "likelihoods.Categorical"
    ignore_index: int = -100
    next_token: bool | Literal["auto"] = "auto"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are class labels, one per position."""
        logits = self.canonical(outputs)
        wanted, num_classes = tuple(logits.shape[:-1]), logits.shape[-1]
        if tuple(targets.shape) != wanted:
            given = tuple(targets.shape)
            swapped = outputs.ndim == 3 and given == (outputs.shape[0], outputs.shape[2])
            hint = "; logits of three axes have the class axis last, so transpose them" if swapped else ""
            raise InputError(
                f"Logits of shape {tuple(outputs.shape)} need labels of shape {wanted}, got {given}{hint}."
            )
        if targets.is_floating_point() or targets.is_complex():
            raise InputError(
                f"Class labels must be whole numbers, not {targets.dtype}: use targets.long(), "
                "or likelihood='gaussian' if this is regression."
            )
        labels = self.aligned(targets)
        wrong = labels[self.observed(targets) & ((labels < 0) | (labels >= num_classes))]
        if len(wrong):
            raise InputError(
                f"The label {wrong[0].item()} is not one of the model's classes, which are 0 to {num_classes - 1}."
            )

    def canonical(self, outputs: Tensor) -> Tensor:
        """Move the class axis last; see the class for where it is."""
        logits = outputs.movedim(1, -1) if outputs.ndim > 3 else outputs
        if logits.ndim < 2 or logits.shape[-1] == 1:
            raise InputError(
                f"A categorical likelihood needs at least two classes, but the model gives one output (shape "
                f"{tuple(outputs.shape)}): use likelihood='bernoulli'."
            )
        return logits

    def restore(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Move the class axis back to where `outputs` has it; leading axes stay."""
        return values.movedim(-1, values.ndim - outputs.ndim + 1) if outputs.ndim > 3 else values

    def aligned(self, targets: Tensor) -> Tensor:
        """Return the labels, with `next_token` each at the position before.

        >>> Categorical(next_token=True).aligned(torch.tensor([[5, 6, 7]])).tolist()
        [[6, 7, -100]]
        """
        if self.next_token is not True:
            return targets
        if targets.ndim != 2:
            raise InputError(
                f"next_token=True needs labels [B, T], one per token, but they have shape {tuple(targets.shape)}."
            )
        return functional.pad(targets[:, 1:], (0, 1), value=self.ignore_index)

    def log_scores(self, prediction: Any, targets: Tensor) -> Tensor:
        """Return the log-probabilities of labels, 0 for those to ignore."""
        return prediction.log_prob(targets, self.ignore_index)

    def observed(self, targets: Tensor) -> Tensor:
        """Return the positions whose label is not `ignore_index`."""
        return self.aligned(targets).long() != self.ignore_index

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability of the labels ``[B]``, summed over positions; ignored ones count 0."""
        logits, labels = self.canonical(outputs).flatten(0, -2), self.aligned(targets).long().flatten()
        losses = functional.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="none")
        return -(losses if targets.ndim == 1 else losses.unflatten(0, targets.shape).flatten(1).sum(dim=1))

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $p - e_y$, zero where the label is ignored."""
        probs = self.canonical(outputs).softmax(dim=-1)
        classes = torch.arange(probs.shape[-1], device=probs.device)
        return self._masked(probs - (self.aligned(targets).unsqueeze(-1) == classes).to(probs.dtype), targets)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return $\mathrm{diag}(p) - p p^\top$, zero where the label is ignored."""
        probs = self._masked(self.canonical(outputs).softmax(dim=-1), targets)
        outer = torch.einsum("...c,...d->...cd", probs, probs)
        off_diagonal = outer * (1 - torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device))
        # Rows sum to zero, so p_c(1 - p_c) = Σ_d p_c p_d: no cancellation where one class is almost certain.
        return torch.diag_embed(off_diagonal.sum(dim=-1)) - off_diagonal

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the C − 1 columns of `softmax_root`, zero where the label is ignored."""
        log_probs = self._masked(self.canonical(outputs).log_softmax(dim=-1), targets)
        numbers = torch.arange(max(log_probs.shape[-1] - 1, 1), device=log_probs.device)
        root = softmax_root(log_probs, numbers.view(-1, *[1] * (log_probs.ndim - 1)))
        return self._masked(root, targets)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels ``[B, *positions]``, as the class with the first of C exponential arrivals with rates p."""
        log_probs = self.canonical(outputs).log_softmax(dim=-1)
        clocks = blank(log_probs, generator).exponential_(generator=generator).to(log_probs.device)
        return (log_probs - clocks.log()).argmax(dim=-1)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the canonical outputs."""
        return self.canonical(outputs)

    def _masked(self, values: Tensor, targets: Tensor | None) -> Tensor:
        """Set ignored positions to zero, also where the logits are NaN because of padding."""
        return values if targets is None else torch.where(self.observed(targets).unsqueeze(-1), values, 0.0)


def softmax_root(log_probs: Tensor, column: Tensor) -> Tensor:
    r"""Return columns ``[..., C]`` of the Cholesky factor of $\mathrm{diag}(p) - p p^\top$, of which the last is zero.

    With the tails $s_r = \sum_{j \ge r} p_j$, column $r$ is $\ell_r = \sqrt{p_r s_{r+1} / s_r}$ on the diagonal and
    $-\ell_r p_j / s_{r+1}$ below (Tanabe & Sagae 1992, "An exact Cholesky decomposition ... of the multinomial
    distribution", Journal of the Royal Statistical Society B 54).

    Args:
        log_probs: Log-probabilities ``[..., C]``.
        column: The number of the column, of a shape that broadcasts with ``[...]``.

    >>> root = softmax_root(torch.tensor([0.5, 0.5]).log(), torch.tensor(0))
    >>> [round(value, 6) for value in root.tolist()]
    [0.5, -0.5]
    """
    log_tails = functional.pad(log_probs.flip(-1).logcumsumexp(dim=-1).flip(-1), (0, 1), value=-torch.inf)
    log_lead = 0.5 * (log_probs + log_tails[..., 1:] - log_tails[..., :-1])
    classes, column = torch.arange(log_probs.shape[-1], device=log_probs.device), column.unsqueeze(-1)
    shape = torch.broadcast_shapes(log_probs.shape[:-1], column.shape[:-1])
    lead, tail = (
        values.expand(*shape, -1).gather(-1, column.expand(*shape, 1))
        for values in (log_lead, log_tails[..., 1:])
    )  # fmt: skip
    shares = torch.where(classes > column, log_probs - tail, -torch.inf).exp()
    return lead.exp() * ((classes == column).to(shares.dtype) - shares)
