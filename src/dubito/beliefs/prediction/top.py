"""Predictions that hold only the most probable classes, for vocabularies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dubito.beliefs.prediction.base import Prediction
from dubito.core.errors import InputError, UnsupportedError


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
