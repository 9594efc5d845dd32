"""Predictions of classes: all of them, or for vocabularies the most probable ones (`TopPrediction`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dubito.beliefs.prediction.base import Prediction, frame
from dubito.beliefs.prediction.uncertainty import LOWEST_LOG, absolute_sum, split_entropy
from dubito.core.arrays import to_tensor
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.tensor_checks import at_least_float32
from dubito.core.tracing import is_tracing

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    r"""Class probabilities, with the entropy split into an aleatoric and an epistemic part.

    With weight samples $p_s$ and their mean $\bar p$, all in nats:

    $$\underbrace{H[\bar p]}_{\text{entropy}} = \underbrace{\tfrac1S \sum_s H[p_s]}_{\text{aleatoric}}
      + \underbrace{I[y; w]}_{\text{epistemic}}$$

    `entropy` is the sum of the other two, so the identity is exact. If `log_probs` come from a link (a probit, say)
    instead of the mean of the samples, the entropies still describe the samples. The entropies have no gradient;
    `log_probs` do.

    Args:
        log_probs: ``[B, *positions, C]``; in log space, so that the NLL of an overconfident float32 network is exact.
        aleatoric: ``[B, *positions]``, the mean entropy of the samples.
        epistemic: ``[B, *positions]``, the mutual information of target and weights.
        samples: ``[S, B, *positions, C]``, the log-probabilities of each weight sample, or None.

    >>> sure_but_split = torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]])  # two samples, one datum, two classes
    >>> prediction = ClassPrediction.from_logit_samples(sure_but_split)
    >>> round(prediction.entropy.item(), 4), round(prediction.aleatoric.item(), 4)
    (0.6931, 0.0)
    """

    log_probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor | None = None

    _batch_axis: ClassVar[dict[str, int]] = {"log_probs": 0, "aleatoric": 0, "epistemic": 0, "samples": 1}

    def __post_init__(self) -> None:
        shape = self.log_probs.shape
        if len(shape) < 2 or self.aleatoric.shape != shape[:-1] or self.epistemic.shape != shape[:-1]:
            raise InputError(
                f"Log-probabilities of shape {tuple(shape)} need entropies of shape {tuple(shape[:-1])}, got "
                f"{tuple(self.aleatoric.shape)} and {tuple(self.epistemic.shape)}."
            )
        if self.samples is not None and self.samples.shape[1:] != shape:
            raise InputError(
                f"Samples of shape {tuple(self.samples.shape)} do not fit log-probabilities of shape {tuple(shape)}."
            )

    @classmethod
    def from_logits(cls, logits: Tensor) -> ClassPrediction:
        """Predict from one network's logits ``[B, *positions, C]``: softmax, no epistemic part."""
        if is_tracing():  # without a sample axis, which takes steps to add and remove
            log_probs = _log_softmax(at_least_float32(logits))
            aleatoric = absolute_sum(log_probs.exp() * log_probs.clamp_min(LOWEST_LOG))
            return cls(log_probs, aleatoric, aleatoric * 0)
        return cls.from_logit_samples(logits.unsqueeze(0), keep_samples=False)

    @classmethod
    def from_logit_samples(
        cls, logits: Tensor, log_probs: Tensor | None = None, keep_samples: bool = True
    ) -> ClassPrediction:
        """Predict from the logits of S weight samples ``[S, B, *positions, C]``.

        Args:
            logits: One set of logits per sample.
            log_probs: The predictive log-probabilities of a link; by default the log of the mean over the samples.
            keep_samples: Whether the prediction holds the samples' log-probabilities.
        """
        samples = _log_softmax(at_least_float32(logits))
        if log_probs is not None and log_probs.dtype != at_least_float32(log_probs).dtype:
            log_probs = _log_softmax(at_least_float32(log_probs))  # in half precision they do not sum to 1
        if log_probs is None:
            log_probs = log_mean_exp(samples)
        _, aleatoric, epistemic = (part.to(samples.dtype) for part in split_entropy(samples))
        return cls(log_probs, aleatoric, epistemic, samples if keep_samples else None)

    @property
    def probs(self) -> Tensor:
        """The class probabilities ``[B, *positions, C]``, in float32 even if the network has half precision."""
        return self.log_probs.exp()

    @property
    def entropy(self) -> Tensor:
        """The total uncertainty in nats ``[B, *positions]``: ``aleatoric + epistemic``."""
        return self.aleatoric + self.epistemic

    @property
    def mode(self) -> Tensor:
        """The most probable class ``[B, *positions]``."""
        return self.log_probs.argmax(dim=-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class ``[B, *positions]``."""
        return self.log_probs.amax(dim=-1).exp()

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.log_probs.shape[-1]

    def log_prob(self, y: Tensor, ignore_index: int | None = None) -> Tensor:
        """Return the log-probability of the labels ``[B]``, summed over positions; ignored positions count 0.

        Two-class labels may also be floats 0 and 1, as `BCEWithLogitsLoss` has them.
        """
        labels = self.checked_targets(y)
        ignored = torch.zeros_like(labels, dtype=torch.bool) if ignore_index is None else labels == ignore_index
        wrong = ((labels < 0) | (labels >= self.num_classes)) & ~ignored
        if wrong.any():
            known = f"the classes, which are 0 to {self.num_classes - 1}"
            raise InputError(f"The label {labels[wrong][0].item()} is not one of {known}.")
        picked = self.log_probs.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1))
        return picked.masked_fill(ignored.unsqueeze(-1), 0.0).flatten(1).sum(dim=1)

    def at_positions(self, kept: Tensor | None = None) -> ClassPrediction:
        """Return a prediction ``[N, C]`` with one datum per position.

        Args:
            kept: Which positions ``[B, *positions]`` to keep; by default all of them.
        """
        if kept is None:
            kept = torch.ones_like(self.aleatoric, dtype=torch.bool)
        samples = None if self.samples is None else self.samples[:, kept]
        return ClassPrediction(self.log_probs[kept], self.aleatoric[kept], self.epistemic[kept], samples)

    def top(self, count: int) -> TopPrediction:
        """Return the `count` most probable classes of each position, or all classes if there are fewer."""
        values, classes = self.log_probs.topk(min(count, self.num_classes), dim=-1)
        return TopPrediction(classes, values, self.aleatoric, self.epistemic)

    def summary(self) -> ClassPrediction:
        """Return the prediction without its samples; probabilities and entropies stay the same."""
        return replace(self, samples=None)

    def to_frame(self, classes: Sequence[str] | None = None) -> pd.DataFrame:
        """Return one row per datum: the probabilities ``p_<class>``, mode, entropy, aleatoric and epistemic.

        Args:
            classes: Names of the classes, for the columns and the mode; by default their numbers.
        """
        if self.log_probs.ndim != 2:
            positions = tuple(self.log_probs.shape[1:-1])
            raise UnsupportedError(
                f"A frame has one row per datum, but each datum here has positions {positions}: use numpy() instead."
            )
        if classes is not None and len(classes) != self.num_classes:
            raise InputError(f"There are {self.num_classes} classes but {len(classes)} names: give one for each.")
        values = self.numpy()
        names = range(self.num_classes) if classes is None else classes
        columns: dict[str, Any] = {f"p_{name}": values["probs"][:, c] for c, name in enumerate(names)}
        columns["mode"] = values["mode"] if classes is None else [classes[c] for c in values["mode"]]
        return frame(columns | {name: values[name] for name in ("entropy", "aleatoric", "epistemic")})

    def checked_targets(self, y: Tensor) -> Tensor:
        """Return the labels ``[B, *positions]`` as integers; raise an error if they do not fit the prediction."""
        y = to_tensor(y, "y").to(self.log_probs.device)
        wanted = self.log_probs.shape[:-1]
        if y.shape == (*wanted, 1):
            y = y.squeeze(-1)
        if y.shape != wanted:
            raise InputError(f"Labels of shape {tuple(y.shape)} do not fit a prediction that needs {tuple(wanted)}.")
        if y.is_complex() or (y.is_floating_point() and (self.num_classes != 2 or bool((y != y.round()).any()))):
            raise InputError(f"Labels must be whole numbers from 0 to {self.num_classes - 1}, not {y.dtype}.")
        return y.long()

    def _headlines(self) -> dict[str, Tensor]:
        names = ("probs", "log_probs", "mode", "entropy", "aleatoric", "epistemic")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.log_probs.shape[:-1]))
        parts = [f"{shape} data" if self.log_probs.ndim == 2 else shape, f"{self.num_classes} classes"]
        parts += [f"mean {name} {getattr(self, name).mean():.3g}" for name in ("entropy", "epistemic")]
        parts += [] if self.samples is None else [f"{len(self.samples)} samples"]
        return f"ClassPrediction({', '.join(parts)})"


def log_mean_exp(samples: Tensor) -> Tensor:
    """Return the log of the mean probabilities of samples ``[S, ...]``."""
    if len(samples) == 1:
        return samples[0]
    # in a graph, the mean probabilities are there already
    return samples.exp().mean(0).log() if is_tracing() else samples.logsumexp(dim=0) - math.log(len(samples))


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax over the last axis; for few classes it is several times faster than torch's."""
    if logits.shape[-1] > 64 or is_tracing():
        return logits.log_softmax(dim=-1)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - shifted.exp().sum(dim=-1, keepdim=True).log()


@dataclass(frozen=True, eq=False, repr=False)
class TopPrediction(Prediction):
    """The most probable classes of each datum or position, the first most probable; see `ClassPrediction.top`.

    Args:
        classes: The classes ``[B, *positions, K]``.
        log_probs: Their log-probabilities.
        aleatoric: ``[B, *positions]``, of all classes.
        epistemic: ``[B, *positions]``, of all classes.
    """

    classes: Tensor
    log_probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    _batch_axis: ClassVar[dict[str, int]] = {"classes": 0, "log_probs": 0, "aleatoric": 0, "epistemic": 0}

    @property
    def samples(self) -> Tensor | None:
        """None: samples are not kept."""
        return None

    @property
    def probs(self) -> Tensor:
        """The probabilities ``[B, *positions, K]``; what they lack to 1 belongs to the other classes."""
        return self.log_probs.exp()

    @property
    def entropy(self) -> Tensor:
        """The total uncertainty in nats over all classes, ``aleatoric + epistemic``."""
        return self.aleatoric + self.epistemic

    @property
    def mode(self) -> Tensor:
        """The most probable class ``[B, *positions]``."""
        return self.classes[..., 0]

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class ``[B, *positions]``."""
        return self.log_probs[..., 0].exp()

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of labels that are all among the classes, ``[B]``, summed over positions."""
        y = torch.as_tensor(y, device=self.classes.device)
        if y.shape != self.aleatoric.shape:
            wanted = tuple(self.aleatoric.shape)
            raise InputError(f"Labels of shape {tuple(y.shape)} do not fit a prediction that needs {wanted}.")
        found = self.classes == y.unsqueeze(-1)
        if not bool(found.any(-1).all()):
            missing = y[~found.any(-1)][0].item()
            raise UnsupportedError(
                f"The label {missing} is not among the {self.classes.shape[-1]} most probable classes, so its "
                "probability was not kept: predict without top_k."
            )
        return torch.where(found, self.log_probs, 0.0).flatten(1).sum(1)

    def summary(self) -> TopPrediction:
        """Return the prediction itself, which has no samples."""
        return self

    def _headlines(self) -> dict[str, Tensor]:
        names = ("classes", "probs", "log_probs", "mode", "entropy", "aleatoric", "epistemic")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.classes.shape[:-1]))
        return f"TopPrediction({shape}, {self.classes.shape[-1]} classes, mean entropy {self.entropy.mean():.3g})"
