"""Likelihoods of students that predict both aleatoric and epistemic uncertainty in one pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, HeteroscedasticGaussian
from dubito.beliefs.likelihoods.base import Hyper
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood, over_samples
from dubito.beliefs.prediction import ClassPrediction
from dubito.core.constraints import Positive, check
from dubito.core.numeric import digamma
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32
from dubito.core.tracing import is_tracing


@setting
class Dirichlet(Categorical):
    r"""Softmax classification whose logits say how much is known, $p \sim \mathrm{Dir}(\alpha)$ with $\alpha = e^f$.

    Its mean is the softmax of the logits, so to labels it is a plain categorical likelihood. The level of the logits,
    $\alpha_0 = \sum_c e^{f_c}$, is the concentration (Malinin & Gales 2018, https://arxiv.org/abs/1802.10501):

    $$\underbrace{H[\bar p]}_{\text{entropy}} = \underbrace{\psi(\alpha_0 + 1) - \sum_c \bar p_c\,\psi(\alpha_c + 1)}_{
      \text{aleatoric}} + \text{epistemic}$$

    >>> known, unknown = Dirichlet().predict(torch.tensor([[5.0, 5.0], [0.0, 0.0]])).epistemic.tolist()
    >>> round(known, 4), round(unknown, 4)
    (0.0017, 0.1931)
    """

    setting_name = "transfer.Dirichlet"

    def predict(self, outputs: Tensor, hyper: Hyper = None) -> ClassPrediction:
        """Return the mean of the Dirichlet, and its entropies in closed form."""
        logits = at_least_float32(self.canonical(outputs))
        total, aleatoric = dirichlet_entropies(logits)
        epistemic = (total - aleatoric).clamp_min(0)
        return ClassPrediction(logits.log_softmax(dim=-1), aleatoric.to(logits.dtype), epistemic.to(logits.dtype))

    def predict_samples(
        self, outputs: Tensor, hyper: Hyper = None, *, log_probs: Tensor | None = None, keep_samples: bool = True
    ) -> ClassPrediction:
        """Return the mixture of the samples' Dirichlets."""
        mixture = super().predict_samples(outputs, hyper, log_probs=log_probs, keep_samples=keep_samples)
        logits = over_samples(self.canonical, outputs)
        aleatoric = dirichlet_entropies(logits)[1].mean(dim=0).to(logits.dtype)
        epistemic = (mixture.entropy - aleatoric).clamp_min(0)
        return ClassPrediction(mixture.log_probs, aleatoric, epistemic, mixture.samples)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Dirichlet]:
        """Temper the mean; the concentration stays."""
        check("temperature", Positive, temperature)
        axis = -1 if outputs.ndim <= 3 else 1
        level = outputs.logsumexp(dim=axis, keepdim=True)
        return (outputs / temperature).log_softmax(dim=axis) + level, self


def dirichlet_entropies(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of the mean of ``Dir(exp(logits))`` and the mean of its entropy ``[...]``, in float64."""
    wide = logits.detach().double()
    probs, alpha = wide.softmax(dim=-1), wide.exp()
    total = torch.special.entr(probs).sum(dim=-1)
    psi = digamma if is_tracing() else torch.digamma  # file formats do not have it
    aleatoric = psi(alpha.sum(dim=-1) + 1) - (probs * psi(alpha + 1)).sum(dim=-1)
    return total, aleatoric.clamp_min(0)


@setting
class GaussianWithUncertainty(RegressionLikelihood):
    r"""Regression with separate noise and function variances, $y_o \sim \mathcal N(m_o,\ e^{s_o} + e^{d_o})$.

    For O targets the network has 3·O outputs ``[B, 3·O]``: the means $m$, the log-variances of the noise $s$ and those
    of the function $d$. To targets it is a heteroscedastic Gaussian with the log-variance $\log(e^s + e^d)$, and all
    derivatives follow from that one by the chain rule.

    >>> prediction = GaussianWithUncertainty().predict(torch.tensor([[3.0, 0.0, math.log(4.0)]]))
    >>> prediction.aleatoric.item(), round(prediction.epistemic.item(), 5)
    (1.0, 4.0)
    """

    setting_name = "transfer.GaussianWithUncertainty"
    former_names = ("transfer.NoiseAndDoubt",)
    outputs_per_target = 3
    layout = "a mean and two log-variances (noise, function)"

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-density of the targets ``[B]``, summed over outputs."""
        return HeteroscedasticGaussian().log_prob(self._total(outputs), targets)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the gradient of ``-log_prob``, ``[B, 3·O]``."""
        return self._pulled(HeteroscedasticGaussian().gradient(self._total(outputs), targets), outputs)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the Fisher information ``[B, 3·O, 3·O]``; of rank 2·O, as only the total variance matters."""
        root = self.hessian_root(outputs)
        return torch.einsum("rbi,rbj->bij", root, root)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return its root, ``[2·O, B, 3·O]``."""
        return self._pulled(HeteroscedasticGaussian().hessian_root(self._total(outputs)), outputs)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``."""
        return HeteroscedasticGaussian().sample(self._total(outputs), generator=generator)

    def moments(self, outputs: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, noise variances and function variances."""
        means, noise, function = outputs.chunk(3, dim=-1)
        return means, noise.exp(), function.exp()

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, GaussianWithUncertainty]:
        """Multiply both standard deviations by the temperature."""
        check("temperature", Positive, temperature)
        means, noise, function = outputs.chunk(3, dim=-1)
        shift = 2 * math.log(temperature)
        return torch.cat([means, noise + shift, function + shift], dim=-1), self

    def _total(self, outputs: Tensor) -> Tensor:
        """Return the outputs of the equivalent heteroscedastic Gaussian."""
        means, noise, function = self.canonical(outputs).chunk(3, dim=-1)
        return torch.cat([means, torch.logaddexp(noise, function)], dim=-1)

    def _pulled(self, values: Tensor, outputs: Tensor) -> Tensor:
        """Pull ``[..., B, 2·O]`` back through `_total`, to ``[..., B, 3·O]``."""
        _, noise, function = self.canonical(outputs).chunk(3, dim=-1)
        of_mean, of_variance = values.chunk(2, dim=-1)
        share = (noise - function).sigmoid()
        return torch.cat([of_mean, of_variance * share, of_variance * (1 - share)], dim=-1)
