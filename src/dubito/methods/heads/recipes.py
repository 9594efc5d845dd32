"""The recipes `VBLL`, `SNGP` and `DKL`: a network with a random last layer, trained by the fit loop."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from dubito.core.constraints import Count, Positive, Start
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.networks.heads import FeatureMap, InducingPoints, RandomFeatures, mean_distance


@setting
class HeadRecipe(Recipe):
    """The base class of recipes for random last layers."""

    has_score = True

    start: Start = "model"

    @property
    def bound(self) -> float | None:
        """The bound on the largest singular value of the other layers; None for no bound."""
        return None

    @abstractmethod
    def feature_map(self, features: Tensor) -> FeatureMap | None:
        """Return the map in front of the last layer, given features ``[N, F]``; None keeps the layer as it is."""

    def prior_variance(self, size: int) -> float:
        """Return the prior variance of each weight of the last layer, which has `size` inputs."""
        return 1.0

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        from dubito.methods.heads.trainer import BoundTrainer

        return BoundTrainer(self, problem).inference()


@setting
class VBLL(HeadRecipe):
    r"""Train the network with a normal posterior over its last layer by a bound without samples.

    $$q(w_c) = \mathcal N(\mu_c, S_c), \qquad
      \max\; \sum_n \underline{\mathbb E_q \log p(y_n \mid W z_n)} - \sum_c \mathrm{KL}(q(w_c) \,\|\, p)$$

    (Harrison et al. 2024, https://arxiv.org/abs/2404.11599). The expectation is exact for a Gaussian likelihood, and
    Jensen's bound $\mu_y^\top z - \log \sum_c \exp(\mu_c^\top z + \tfrac12 z^\top S_c z)$ for classes. The other layers
    are trained as points. `Laplace(weights=select.last_layer())` has the same form of posterior after the training.

    Args:
        prior_scale: The prior standard deviation of an output whose F features are all 1: each weight has the prior
            variance prior_scale² / F.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "VBLL"
    prior_scale: Positive = 10.0

    def feature_map(self, features: Tensor) -> None:
        """Keep the last layer."""

    def prior_variance(self, size: int) -> float:
        """Return prior_scale² divided by the number of inputs."""
        return self.prior_scale**2 / size


@setting
class SNGP(HeadRecipe):
    r"""Train a Gaussian-process head on distance-aware features: a spectral-normalized neural Gaussian process.

    The last layer becomes $f_c = \beta_c^\top \phi(z)$ with random Fourier features φ of the RBF kernel, and every
    other layer's largest singular value is kept below a bound: distant inputs stay distant in the features. After
    training, $q(\beta_c) = \mathcal N\big(\hat\beta_c, (\lambda I + \sum_n h_{nc}\, \phi_n \phi_n^\top)^{-1}\big)$ with
    the Hessian $h_{nc}$ of the loss in output c (Liu et al. 2020, https://arxiv.org/abs/2006.10108).

    Args:
        num_features: The number of random features.
        spectral_norm: The bound on the singular values; None for none.
        prior_precision: λ.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "SNGP"
    num_features: Count = 512
    spectral_norm: Positive | None = 3.0
    prior_precision: Positive = 1.0

    @property
    def bound(self) -> float | None:
        """`spectral_norm`."""
        return self.spectral_norm

    def feature_map(self, features: Tensor) -> FeatureMap:
        """Return random Fourier features."""
        return RandomFeatures(features.shape[1], self.num_features, mean_distance(features))

    def prior_variance(self, size: int) -> float:
        """Return 1 / λ."""
        return 1 / self.prior_precision

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        from dubito.methods.heads.trainer import LaplaceTrainer

        return LaplaceTrainer(self, problem).inference()


@setting
class DKL(HeadRecipe):
    r"""Train a sparse variational Gaussian process on the network's features: deep kernel learning.

    $$f_c(x) = v_c^\top L^{-1} k(Z, z(x)) + b_c + \epsilon, \qquad q(v_c) = \mathcal N(\mu_c, S_c), \quad v_c \sim \mathcal N(0, I)$$

    with inducing points $Z$ among the features, $L L^\top = k(Z, Z)$, an RBF kernel, and ε of the variance that the
    inducing points leave, which makes the outputs uncertain far from them. Kernel, inducing points and network are
    trained on the bound of `VBLL` (Wilson et al. 2016, https://arxiv.org/abs/1611.00336; van Amersfoort et al. 2021,
    https://arxiv.org/abs/2102.11409).

    Args:
        inducing: The number of inducing points; at most the number of training examples.
        spectral_norm: A bound on the largest singular value of every other layer, against features that collapse;
            None for none.
        start: Where training starts, as for `MAP`.
    """  # noqa: E501 - a formula

    setting_name = "DKL"
    inducing: Count = 64
    spectral_norm: Positive | None = 3.0

    @property
    def bound(self) -> float | None:
        """`spectral_norm`."""
        return self.spectral_norm

    def feature_map(self, features: Tensor) -> FeatureMap:
        """Return inducing points at features that are evenly spread over those given."""
        count = min(self.inducing, len(features))
        chosen: Any = [i * len(features) // count for i in range(count)]
        return InducingPoints(features[chosen], mean_distance(features))
