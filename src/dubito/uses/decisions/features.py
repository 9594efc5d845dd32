r"""How far the features of an input lie from those of the training data: higher is farther.

Features $z$ are the inputs of a network's last linear layer, at the posterior's mean, averaged over positions.

| name | score |
|---|---|
| ``"feature-density"`` | $-\log \sum_c \pi_c\, \mathcal N(z; \mu_c, \Sigma_c)$, a Gaussian per class (DDU, Mukhoti et al. 2023, https://arxiv.org/abs/2102.11582) |
| ``"mahalanobis"`` | $\min_c (z - \mu_c)^\top \Sigma^{-1} (z - \mu_c)$, one covariance for all classes (Lee et al. 2018, https://arxiv.org/abs/1807.03888) |
| ``"nearest-neighbours"`` | the distance of $z / \lVert z \rVert$ to the k-th nearest of the training data (Sun et al. 2022, https://arxiv.org/abs/2204.06507) |

A regression has one class. To every covariance, 0.001 of its mean variance is added, because few data do not span all
directions.
"""  # noqa: E501 - a table

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.core import batches, params
from dubito.core.batches import Data
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.posterior import Posterior
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.networks.layers import channel_axis
from dubito.networks.output_layer import Tap, last_layer
from dubito.networks.swapping import swap_class
from dubito.networks.twin import twin
from dubito.uses.fixed_draws import check_scores, labelled_groups

FeatureScore = Literal["feature-density", "mahalanobis", "nearest-neighbours"]

# The share of the mean variance that is added to a covariance, the neighbour whose distance counts, and the most
# training features that are kept for it.
RIDGE, NEIGHBOUR, MOST_KEPT = 1e-3, 10, 20_000


class FeatureDensity:
    """The features of training data, as a `Detector` keeps them.

    Args:
        posterior: The posterior.
        training: The data it was trained on, with labels if it predicts classes.
        score: How the distance is measured.
    """

    def __init__(self, posterior: Posterior, training: Data, score: FeatureScore) -> None:
        self.score = score
        groups = labelled_groups(posterior, training, "training data")
        self.layer = last_layer(posterior.model, batches.take(groups[0][0], slice(0, 1)))
        features = torch.cat([self.features(posterior, inputs) for inputs, _ in groups])
        if score == "nearest-neighbours":
            self.tensors = {"known": _kept(_of_length_one(features))}
            return
        labels = torch.zeros(len(features), dtype=torch.int64, device=features.device)
        if isinstance(posterior.likelihood, ClassLikelihood):
            labels = torch.cat([targets for _, targets in groups])
            if labels.shape != features.shape[:1]:
                raise UnsupportedError("Densities of classes need one label per input: use score='nearest-neighbours'.")
        self.tensors = _gaussians(features, labels.long(), shared=score == "mahalanobis")

    def features(self, posterior: Posterior, x: Any) -> Tensor:
        """Return the features of inputs ``[B, F]`` in float64."""
        network = PointPosterior(
            _Features(posterior.model, self.layer), Gaussian(noise=1.0), MAP(train=False), posterior.num_data
        )
        return network.predict(x).mean.double()  # type: ignore[attr-defined]

    def scores(self, posterior: Posterior, x: Any) -> Tensor:
        """Return the distance of each input from the training data ``[B]``."""
        features = self.features(posterior, x)
        known = {name: value.to(features.device) for name, value in self.tensors.items()}
        if self.score == "nearest-neighbours":
            parts = _of_length_one(features).split(1024)
            rank = min(NEIGHBOUR, len(known["known"]))
            found = [torch.cdist(part, known["known"]).kthvalue(rank, dim=1).values for part in parts]
            return check_scores(torch.cat(found), self.score)
        centred = features.unsqueeze(1) - known["means"]  # [B, C, F]
        white = torch.linalg.solve_triangular(known["roots"], centred.unsqueeze(-1), upper=False).squeeze(-1)
        squares = white.square().sum(-1)
        if self.score == "mahalanobis":
            return check_scores(squares.amin(1), self.score)
        log_dets = known["roots"].diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * features.shape[1] * math.log(2 * math.pi)
        return check_scores(-(known["log_shares"] - 0.5 * squares - log_dets - constant).logsumexp(1), self.score)

    def to_tree(self) -> dict[str, Any]:
        """Return what to save."""
        return {"layer": self.layer, **self.tensors}

    @classmethod
    def from_tree(cls, score: FeatureScore, tree: Mapping[str, Any]) -> Self:
        """Undo `to_tree`."""
        found = object.__new__(cls)
        found.score, found.layer = score, tree["layer"]
        found.tensors = {name: value for name, value in tree.items() if name != "layer"}
        return found


def _of_length_one(features: Tensor) -> Tensor:
    """Return features of length one."""
    return features / features.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _gaussians(features: Tensor, labels: Tensor, shared: bool) -> dict[str, Tensor]:
    """Return mean, covariance root and log share of each class that occurs."""
    classes, counts = labels.unique(return_counts=True)
    own = [features[labels == each] for each in classes]
    means = torch.stack([each.mean(0) for each in own])
    scatters = torch.stack([(each - mean).T @ (each - mean) for each, mean in zip(own, means, strict=True)])
    pooled = scatters.sum(0) / len(features)
    ridge = RIDGE * float(pooled.diagonal().mean()) * torch.eye(len(pooled), dtype=pooled.dtype, device=pooled.device)
    if not float(ridge.trace()) > 0:
        raise InputError("The features of the training data do not vary: give more than one example of a class.")
    covariances = pooled.unsqueeze(0) if shared else scatters / counts[:, None, None]
    roots = torch.linalg.cholesky(covariances + ridge)
    return {"means": means.cpu(), "roots": roots.cpu(), "log_shares": (counts.double() / len(features)).log().cpu()}


def _kept(features: Tensor) -> Tensor:
    """Return the features, or evenly spaced ones of too many."""
    step = -(-len(features) // MOST_KEPT)
    return features[::step].cpu().clone()


class _Features(nn.Module):
    """A network that returns the features of another, so that `predict` can batch it."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.network, self.layer = twin(model), layer
        swap_class(self.network.get_submodule(layer), Tap)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        params.call(self.network, args or kwargs)
        tap = self.network.get_submodule(self.layer)
        features = tap.seen
        assert isinstance(features, Tensor)
        if features.ndim < 3:
            return features
        is_first = channel_axis(tap, features.ndim) == 1
        return features.flatten(2).mean(2) if is_first else features.flatten(1, -2).mean(1)
