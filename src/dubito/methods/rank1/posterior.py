"""The posterior that `Rank1` and `BatchEnsemble` find: a mixture over the factors of one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.core import batches, limits, params
from dubito.core.errors import UnsupportedError
from dubito.core.limits import numbers
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.methods.rank1 import families, forms
from dubito.methods.rank1.layers import merge
from dubito.methods.rank1.module import Rank1Module
from dubito.methods.rank1.sites import find_layout
from dubito.networks.normalization import running_norms
from dubito.networks.twin import twin

# The default number of samples of each component if its factors have heavy tails; else it is one.
HEAVY_DRAWS = 4


@dataclass(frozen=True)
class Components:
    """The tensors that differ between components."""

    loc: Tensor  # the locations of the factors ``[K, D]``
    scale: Tensor | None  # their scales ``[K, D]``, or ``[1, D]`` if components share them; None for point estimates
    bias: Tensor  # the biases of the factored layers ``[K, E]``
    norms: Params  # gains and statistics of normalization layers ``[K, ...]`` by name, if each component has its own
    left_out: tuple[str, ...]  # layers without factors because their inputs have no batch axis
    mergeable: bool  # whether a sample of the factors can be merged into the weights of a plain network


class Rank1Posterior(Posterior):
    r"""The result of `Rank1` and `BatchEnsemble`: an equal mixture of K components $W \circ r_k s_k^\top$.

    On the sample axis of a prediction, sample i belongs to component ``i % K``. By default there is one sample of each
    component (four for the Cauchy family). A number that is not a multiple of K is rounded up, so that all components
    have equal weight.

    Args:
        model: The network with the shared weights.
        likelihood, recipe, num_data: As for `Posterior`.
        mixture: The tensors that differ between components.
    """

    family = "Rank1"

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, mixture: Components
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.mixture, self.rank1 = mixture, recipe.as_rank1()
        self.layout = find_layout(model, self.rank1.factors, mixture.left_out)

    @property
    def components(self) -> int:
        """The number of components K."""
        return len(self.mixture.loc)

    @property
    def num_parameters(self) -> int:
        """The number of learned parameters: shared weights, factors, biases and gains of all components."""
        own = {*self.layout.bias_names, *self.mixture.norms}
        shared = sum(value.numel() for name, value in self.model.named_parameters() if name not in own)
        gains = {name for name, _ in self.model.named_parameters()} & self.mixture.norms.keys()
        found = [self.mixture.loc, self.mixture.bias, *(self.mixture.norms[name] for name in gains)]
        found += [] if self.mixture.scale is None else [self.mixture.scale]
        return shared + sum(value.numel() for value in found)

    @property
    def default_samples(self) -> int:
        """One sample of each component, or four if the factors have heavy tails."""
        return self.components * (HEAVY_DRAWS if self.rank1.family == "cauchy" else 1)

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture over samples that are the same for all inputs of a call."""
        outputs_of = self.networks(*self.draw_members(num_samples, generator))

        def predict(inputs: Any) -> Prediction:
            return self.likelihood.predict_samples(torch.stack(list(outputs_of(inputs))))

        return predict

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield one network on copies of the inputs that differ only in their factors: shared weights stay shared."""
        yield from forms.forms(self, example, num_samples, generator)

    def draw_members(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the component ``[S]`` and drawn factors ``[S, D]`` of each member of a prediction."""
        rounds = 1 if self.mixture.scale is None else -(-num_samples // self.components)
        members = torch.arange(self.components).repeat(rounds)
        return members, self._draw(members, generator)

    def networks(self, members: Tensor, factors: Tensor) -> Callable[[Any], Iterator[Tensor]]:
        """Return the function from inputs to the outputs of each sample, at given factors.

        Args:
            members: The component of each sample ``[S]``.
            factors: Its factors ``[S, D]``.
        """
        pairs = list(zip(members.tolist(), factors, strict=True))
        if not self.mixture.mergeable:
            return lambda inputs: self._by_module(inputs, pairs)
        size = len(pairs) * params.num_weights(dict(self.model.named_parameters()))
        kept = [self._values(k, f) for k, f in pairs] if size <= numbers(limits.current().kept_weights) else None

        def outputs(inputs: Any) -> Iterator[Tensor]:
            for values in kept or (self._values(k, f) for k, f in pairs):
                yield params.functional_call(self.model, values, inputs)

        return outputs

    def outputs_of(self, pairs: Sequence[tuple[int, Tensor]], inputs: Any) -> Iterator[Tensor]:
        """Yield the outputs of each pair of component and factors; weights are made of the shared ones in each call."""
        for component, factors in pairs:
            yield params.functional_call(self.model, self._values(component, factors), inputs)

    def center(self) -> Tensor:
        """Return the medians of all factors ``[K, D]``."""
        return families.center(self.rank1.family, self.mixture.loc)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights; the components alternate, in a random order."""
        self._require_weights()
        generator = default_generator(generator)
        order = torch.randperm(self.components, generator=generator, device=generator.device).cpu()
        members = order[torch.arange(num_samples) % self.components]
        drawn = self._weights(members, self._draw(members, generator))
        shapes = {name: (num_samples, *value.shape) for name, value in self.model.named_parameters()}
        return {name: value.expand(shapes[name]).clone() for name, value in drawn.items()}

    def mean(self) -> Params:
        """Return the weights at the medians of the factors, averaged over components."""
        if not self.mixture.mergeable:
            return params.of(self.model)
        drawn = self._weights(torch.arange(self.components), self.center())
        shapes = {name: value.ndim for name, value in self.model.named_parameters()}
        return {name: value.mean(0) if value.ndim > shapes[name] else value for name, value in drawn.items()}

    def marginals(self) -> tuple[Params, Params]:
        """Return mean and variance of every weight if there is one component; several components raise an error."""
        if self.components > 1:
            raise UnsupportedError(
                f"The mean and variance of each weight do not describe a mixture of {self.components} components: draw "
                "weights with sample, or fit Rank1(components=1)."
            )
        self._require_weights()
        mixture = self.mixture
        mean, variance = (v.double() for v in families.moments(self.rank1.family, mixture.loc, mixture.scale))
        values = {name: value.double() for name, value in params.of(self.model).items()}
        squares = {name: value.square() for name, value in values.items()}
        bias = mixture.bias[0].double()
        first = merge(self.model, self.layout, values, mean[0], bias)
        second = merge(self.model, self.layout, squares, (mean.square() + variance)[0], bias.square())
        spread = {name: (second[name] - first[name].square()).clamp_min(0).to(self.dtype) for name in first}
        return {name: value.to(self.dtype) for name, value in first.items()}, spread

    def prior(self) -> tuple[Params, Params]:
        """Raise an error: the prior is over factors, not over weights."""
        raise UnsupportedError("The prior of a Rank1 posterior is over factors that many weights share, not weights.")

    def state(self) -> dict[str, Any]:
        """Return the tensors of the components."""
        own = self.mixture
        return {"loc": own.loc, "scale": own.scale, "bias": own.bias, "norms": own.norms,
                "left_out": list(own.left_out), "mergeable": own.mergeable}  # fmt: skip

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        mixture = Components(**{**state, "left_out": tuple(state["left_out"])})
        return cls(model, likelihood, recipe, num_data, mixture)

    def _draw(self, members: Tensor, generator: torch.Generator) -> Tensor:
        """Draw factors ``[S, D]`` of the given components."""
        loc, scale = self.mixture.loc, self.mixture.scale
        if scale is not None and len(scale) > 1:
            scale = scale[members]
        return families.draw(self.rank1.family, loc[members], scale, generator=generator)

    def _weights(self, component: int | Tensor, factors: Tensor) -> Params:
        """Return the parameters of a plain network at one sample of the factors, or of several networks ``[S]``."""
        own = {name: value[component] for name, value in self.mixture.norms.items()}
        shared = {name: own.get(name, value) for name, value in params.of(self.model).items()}
        return merge(self.model, self.layout, shared, factors, self.mixture.bias[component])

    def _values(self, component: int, factors: Tensor) -> Params:
        """Return the parameters and the statistics of a plain network at one sample of the factors."""
        statistics = {name: value[component] for name, value in self.mixture.norms.items()}
        return {**statistics, **self._weights(component, factors)}

    def _by_module(self, inputs: Any, pairs: list[tuple[int, Tensor]]) -> Iterator[Tensor]:
        rows = batches.num_rows(inputs)
        for k, factors in pairs:
            yield self._module.run_with(inputs, [(k, rows)], factors, self.mixture.bias[k])

    def _require_weights(self) -> None:
        if not self.mixture.mergeable:
            raise UnsupportedError(
                "These factors cannot be merged into weights (they are additive, or act on tied or unknown layers), so "
                "there are no weights to draw: use predict."
            )
        if running_norms(self.model) and self.mixture.norms:
            raise UnsupportedError(
                "Each component has its own normalization statistics, which are not weights: use predict, or fit with "
                "normalization='shared'."
            )

    @cached_property
    def _module(self) -> Rank1Module:
        """The mixture as a module, for factors that cannot be merged into weights."""
        unused = torch.Generator()  # predictions draw their own factors
        module = Rank1Module(twin(self.model), self.layout, self.rank1, generator=unused)
        module.eval().requires_grad_(False)
        params.load_(module.network, self.mixture.norms)
        return module
