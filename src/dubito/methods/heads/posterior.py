"""The posterior of `VBLL`, `SNGP` and `DKL`: a Gaussian over the last layer of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.constraints import Count, check
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.curvature import links
from dubito.fitting.functions import Functions, network_functions
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.methods.heads.module import linear_of, tapped_twin
from dubito.networks.heads import FeatureHead, InducingPoints, PathHead, RandomFeatures, attach, replaced

# Logits are sampled independently of each other, as the outputs of the head are.
SAMPLED = links.Link(None, reads_covariance=False)
# The number of random waves of a drawn function.
WAVES = 512


class HeadPosterior(Posterior):
    """A Gaussian over the weights of the last layer, independent between outputs; the other weights are points.

    `SNGP` and `DKL` change the last layer, so `posterior.model` is not the network that was given: its last layer is a
    feature map and a linear layer.

    Args:
        model: The network at the means.
        likelihood, recipe, num_data: As for `Posterior`.
        layer: The name of the last layer.
        roots: A root of the covariance of each output's weights, ``[C, P, P]``.
        prior_variance: The prior variance of each of these weights.
    """

    family = "Head"
    saved = ("layer", "roots", "prior_variance")
    draws_functions = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        layer: str,
        roots: Tensor,
        prior_variance: float,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.layer, self.roots, self.prior_variance = layer, roots, prior_variance

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights; the part of a `DKL` posterior that its inducing points leave undetermined is not one."""
        generator = default_generator(generator)
        shape = (num_samples, *self.roots.shape[:2])
        noise = torch.randn(shape, generator=generator, dtype=self.roots.dtype, device=generator.device)
        moved = torch.einsum("cpq,scq->scp", self.roots, noise.to(self.roots.device))
        drawn = {name: value.expand(num_samples, *value.shape) for name, value in self.mean().items()}
        return {**drawn, **{name: drawn[name] + part for name, part in self._parts(moved).items()}}

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions of the inputs; those of `DKL` also vary where its inducing points determine nothing."""
        head = self.model.get_submodule(self.layer)
        if not (isinstance(head, FeatureHead) and isinstance(head.features, InducingPoints)):
            return super().functions(num_functions, generator=generator)
        check("num_functions", Count, num_functions)
        generator = default_generator(generator)
        prefix = f"{self.layer}." if self.layer else ""
        draws = params.unstack(self.sample(num_functions, generator=generator))
        for draw in draws:
            waves = PathHead.drawn(WAVES, head, generator)
            draw.update({f"{prefix}{name}": value for name, value in waves.items()})
        return network_functions(replaced(self.model, self.layer, PathHead(head, WAVES)), draws)

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances; the variance is 0 outside of the last layer."""
        mean = self.mean()
        return mean, {**params.zeros_like(mean), **self._parts(self.roots.square().sum(-1))}

    def prior(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the prior; a weight that is not random has its value as the mean."""
        mean = self.mean()
        variance = self._parts(torch.full_like(self.roots[..., 0], self.prior_variance))
        return {**mean, **params.zeros_like(variance)}, {**params.zeros_like(mean), **variance}

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        link: Literal["probit", "mc"] = "probit",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution, in closed form for a regression.

        Args:
            num_samples: The number of samples of the outputs of a classifier.
            generator: The source of randomness.
            link: How Gaussian logits become probabilities: ``"probit"`` scales them down by their uncertainty,
                ``"mc"`` averages the probabilities of samples, as for preferences always.
            options: No other option is known.
        """
        check("link", Literal["probit", "mc"], link)
        head, noise = tapped_twin(self.model, self.layer, self.roots), links.Noise(num_samples, generator)
        chosen = links.PROBIT if link == "probit" else SAMPLED

        def predict(inputs: Any) -> Any:
            if head.compares(self.likelihood):
                scores, roots = head.joint(inputs, self.likelihood)
                return self.likelihood.predict_samples(scores + (roots * noise.like(roots[:, :1])).sum(-1))
            mean, variance = head.moments(inputs)
            return links.predict(self.likelihood, mean, self.likelihood.canonical(variance), noise, chosen)

        return predict

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the closed form."""
        yield Traceable(self.predictor(num_samples, generator, **options), "the last layer in closed form")

    def _parts(self, values: Tensor) -> Params:
        """Split values ``[..., C, P]`` into those of the weight and of a random bias, by name."""
        name, has_bias = linear_of(self.model, self.layer)
        linear: Any = self.model.get_submodule(name)
        prefix, inputs = f"{name}." if name else "", linear.in_features
        bias = {f"{prefix}bias": values[..., -1]} if has_bias and linear.bias is not None else {}
        return {f"{prefix}weight": values[..., :inputs], **bias}

    def state(self) -> dict[str, Any]:
        """Return the covariance and the kind of the last layer."""
        head = self.model.get_submodule(self.layer)
        kind = type(head.features).__name__ if isinstance(head, FeatureHead) else None
        return {**super().state(), "features": kind}

    @classmethod
    def network_for(cls, model: nn.Module, tree: Mapping[str, Any]) -> nn.Module:
        """Return the network that was given with the last layer of this posterior."""
        state = tree["state"]
        old, size, kind = model.get_submodule(state["layer"]), state["roots"].shape[1], state["features"]
        if kind is None or not isinstance(old, nn.Linear):
            return model
        if kind == "RandomFeatures":
            return attach(model, state["layer"], RandomFeatures(old.in_features, size))
        return attach(model, state["layer"], InducingPoints(old.weight.new_zeros(size, old.in_features)))
