"""The categorical likelihood: one of C classes, at one position or at many."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dubito.errors import InputError
from dubito.likelihoods.base import Hyper, Likelihood, blank, check_temperature
from dubito.prediction import ClassPrediction
from dubito.settings import setting


@setting
class Categorical(Likelihood):
    r"""Softmax classification, $\log p(y \mid f) = f_y - \log \sum_c e^{f_c}$.

    The layout of the logits follows from their number of axes:

    - ``[B, C]``: one label per datum ``[B]``;
    - ``[B, T, C]``: a sequence, class axis last (as transformers give it), labels ``[B, T]``;
    - ``[B, C, H, W]`` and more axes: class axis second (torch's convention for segmentation), labels ``[B, H, W]``.

    With $p$ the softmax, the Hessian is $\mathrm{diag}(p) - p p^\top$ and the columns of its root are
    $\sqrt{p_r}\,(e_r - p)$.

    Args:
        ignore_index: The label of positions that do not count (padding): no likelihood, gradient or curvature.

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp().item()
    0.25
    """

    setting_name = "likelihoods.Categorical"
    ignore_index: int = -100

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless the targets are labels of the classes, one per position."""
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
        wrong = targets[self.observed(targets) & ((targets < 0) | (targets >= num_classes))]
        if len(wrong):
            raise InputError(
                f"The label {wrong[0].item()} lies outside of the model's classes, which are 0 to {num_classes - 1}."
            )

    def canonical(self, outputs: Tensor) -> Tensor:
        """Move the class axis last; see the class for where it is looked for."""
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

    def observed(self, targets: Tensor) -> Tensor:
        """Return where the label is not `ignore_index`."""
        return targets.long() != self.ignore_index

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-probability of the labels ``[B]``, summed over positions; ignored ones count 0."""
        logits, labels = self.canonical(outputs).flatten(0, -2), targets.long().flatten()
        losses = functional.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="none")
        return -(losses if targets.ndim == 1 else losses.unflatten(0, targets.shape).flatten(1).sum(dim=1))

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $p - e_y$, zero where the label is ignored."""
        probs = self.canonical(outputs).softmax(dim=-1)
        classes = torch.arange(probs.shape[-1], device=probs.device)
        return self._masked(probs - (targets.unsqueeze(-1) == classes).to(probs.dtype), targets)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return $\mathrm{diag}(p) - p p^\top$, zero where the label is ignored."""
        probs = self._masked(self.canonical(outputs).softmax(dim=-1), targets)
        outer = torch.einsum("...c,...d->...cd", probs, probs)
        off_diagonal = outer * (1 - torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device))
        # Rows sum to zero, so p_c(1 - p_c) = Σ_d p_c p_d: no cancellation where one class is almost certain.
        return torch.diag_embed(off_diagonal.sum(dim=-1)) - off_diagonal

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the C columns $\sqrt{p_r}\,(e_r - p)$, zero where the label is ignored."""
        log_probs = self._masked(self.canonical(outputs).log_softmax(dim=-1), targets)
        identity = torch.eye(log_probs.shape[-1], dtype=log_probs.dtype, device=log_probs.device)
        roots = self._masked((0.5 * log_probs).exp(), targets)  # √p does not underflow where p does
        return (roots.unsqueeze(-1) * (identity - log_probs.exp().unsqueeze(-2))).movedim(-2, 0)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels ``[B, *positions]``: the winner of a race of exponential clocks with rates p."""
        log_probs = self.canonical(outputs).log_softmax(dim=-1)
        clocks = blank(log_probs, generator).exponential_(generator=generator).to(log_probs.device)
        return (log_probs - clocks.log()).argmax(dim=-1)

    def predict(self, outputs: Tensor, hyper: Hyper = None) -> ClassPrediction:
        """Return the softmax of one network's logits."""
        return ClassPrediction.from_logits(self.canonical(outputs))

    def predict_samples(
        self,
        outputs: Tensor,
        hyper: Hyper = None,
        *,
        log_probs: Tensor | None = None,
        keep_samples: bool = True,
    ) -> ClassPrediction:
        """Return the mean of the samples' softmax (or the given link's `log_probs`)."""
        logits = torch.stack([self.canonical(sample) for sample in outputs])
        return ClassPrediction.from_logit_samples(logits, log_probs, keep_samples)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Categorical]:
        """Divide the logits by the temperature."""
        check_temperature(temperature)
        return outputs / temperature, self

    def _masked(self, values: Tensor, targets: Tensor | None) -> Tensor:
        """Return zero where the label is ignored, also where padding made the logits NaN."""
        return values if targets is None else torch.where(self.observed(targets).unsqueeze(-1), values, 0.0)
