"""A network with random weights, as a plain `nn.Module` for any training loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.numeric import sum_scalars
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.fitting.training import Training
from dubito.methods.variational.layer import StochasticLayer, compute_moments, make_plain
from dubito.methods.variational.mean_field import MeanField, samples_and_kl
from dubito.networks.selection import Selection
from dubito.networks.swapping import calling_every_layer, fused_modules
from dubito.networks.twin import light_copy

if TYPE_CHECKING:
    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data
    from dubito.methods.variational.posterior import VariationalPosterior


class KnownKL:
    """The KL divergence that a call has computed, for one use: until its graph is freed, or a parameter changes.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.versions: list[int] = []

    def keep(self, value: Tensor, versions: list[int], shared: Iterable[Tensor]) -> None:
        """Keep the value until a backward pass frees the graph that it shares with other tensors."""
        self.value, self.versions = value, versions
        number, own = id(value), weakref.ref(self)  # a hook that held the value would keep its graph forever

        def forget(*_: Any) -> None:
            if (known := own()) is not None and known.value is not None and id(known.value) == number:
                known.value = None

        for node in {tensor.grad_fn for tensor in shared}:
            if node is not None:
                node.register_hook(forget)

    def take(self, versions: list[int]) -> Tensor | None:
        """Return the value if it still holds, and forget it."""
        value, self.value = self.value, None
        return value if versions == self.versions and torch.is_grad_enabled() else None

    def __deepcopy__(self, memo: Any) -> KnownKL:
        return KnownKL()

    def __reduce__(self) -> Any:
        return KnownKL, ()


class VariationalModule(nn.Module):
    """A network with a mean-field normal posterior over some of its weights, made by `convert`.

    Every call draws new weights, in training and in evaluation mode. `network` keeps the user's parameter names; its
    parameters are the means, and `posterior` holds the scales. Some weights are sampled once for the whole call: those
    of layers that cannot put the noise on their outputs (recurrent and attention layers), tied weights, and all weights
    under ``estimator="weight"``.

    Args:
        network: A private copy of the network, with stochastic layers where possible.
        posterior: The posteriors by parameter name.
        selection: The random weights.
        estimator: ``"local"``, ``"flipout"`` or ``"weight"``.
    """

    def __init__(
        self, network: nn.Module, posterior: Mapping[str, MeanField], selection: Selection, estimator: str
    ) -> None:
        super().__init__()
        self.network = network
        self.posterior = nn.ModuleDict({_key(name): part for name, part in posterior.items()})
        self.selection, self.estimator = selection, estimator
        self.layers = [module for module in network.modules() if isinstance(module, StochasticLayer)]
        on_outputs = {id(part) for layer in self.layers for part in layer.random.values()}
        self.sampled = [name for name, part in posterior.items() if id(part) not in on_outputs]
        self.fused = fused_modules(network)
        self.settings: dict[str, Any] = {}  # the arguments of `convert`, for `to_posterior`
        self.weight_noise: torch.Generator | None = None
        self.ready: Params = {}  # weights that a training step has drawn for its first call
        self.shares = False  # whether a training step has computed the moments
        self.known_kl = KnownKL()
        self.at_sample = False  # whether the parameters are a weight sample, that of `NaturalOptimizer`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with newly drawn weights.

        In training, the moments of the weights are computed once for this call and for the next one of `kl`.
        """
        if self.at_sample:
            return self.network(*args, **kwargs)
        with self._shared_with_kl(), self._one_pass():
            output = self.network(*args, **kwargs)
        if any(layer.calls > 1 and not layer.shared for layer in self.layers):
            for layer in self.layers:
                layer.shared = layer.shared or layer.calls > 1
            return self.forward(*args, **kwargs)  # once at most: layers that are called twice now share a sample
        return output

    def kl(self, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the KL divergence of the posterior from the prior, summed over all random weights, tied ones once.

        It is exact if the prior has a closed form, otherwise an unbiased estimate from one sample.
        """
        if generator is not None:
            default_generator(generator)  # checked by hand, because every training step calls this
        elif (known := self.known_kl.take(self._versions())) is not None:
            return known
        means = self._means()
        return torch.stack([part.kl(means[name], generator=generator) for name, part in self.parts()]).sum()

    @contextmanager
    def shared_moments(self) -> Iterator[Tensor]:
        """Yield the KL divergence, and share its moments with the calls inside the block, for a training step."""
        self.shares = True
        try:
            yield self._share()
        finally:
            self.shares = False
            self.ready.clear()
            for layer in self.layers:
                layer.moments = None

    @contextmanager
    def _shared_with_kl(self) -> Iterator[None]:
        """Compute moments and KL divergence together for a call in training, and keep the latter for `kl`."""
        trains = self.training and torch.is_grad_enabled() and type(self) is VariationalModule
        if not trains or self.shares or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            yield
            return
        with self.shared_moments() as kl:
            moments = [tensor for layer in self.layers for pair in (layer.moments or {}).values() for tensor in pair]
            self.known_kl.keep(kl, self._versions(), [*moments, *self.ready.values()])
            yield

    def _versions(self) -> list[int]:
        """Return numbers that change when a mean or a scale does."""
        return [value._version for value in self.parameters()]

    def _share(self) -> Tensor:
        """Compute the moments of layers, draw the other weights, and return the KL divergence."""
        terms = []
        if self.estimator == "local" and self.layers:
            terms.append(compute_moments(self.layers))
        elif self.layers:
            means, sampled = self._means(), set(self.sampled)
            terms += [part.kl(means[name]) for name, part in self.parts() if name not in sampled]
        if self.sampled:
            means, parts = self._means(), dict(self.parts())
            chosen = [parts[name] for name in self.sampled], [means[name] for name in self.sampled]
            drawn, kl = samples_and_kl(*chosen, generator=self.weight_noise)
            self.ready |= zip(self.sampled, drawn, strict=True)
            terms.append(kl)
        return sum_scalars(terms)

    def sample_weights(self, *, generator: torch.Generator | None = None) -> Params:
        """Draw all random parameters, by name; differentiable in means and scales."""
        means = self._means()
        return {name: part.sample(means[name], generator=generator) for name, part in self.parts()}

    def log_ratio(self, weights: Params) -> Tensor:
        r"""Return $\log p(w) - \log q(w)$ of one sample, differentiable in the weights only."""
        means = self._means()
        return torch.stack([part.log_ratio(means[name], weights[name]) for name, part in self.parts()]).sum()

    def mean_module(self) -> nn.Module:
        """Return the network at the means, with the user's own classes."""
        return self.plain_network({})

    def plain_network(self, lent: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the network with the user's own classes; the tensors in `lent` are shared, not copied."""
        network = light_copy(self.network, {id(value): value for value in lent.values()})
        for module in network.modules():
            if isinstance(module, StochasticLayer):
                make_plain(module)
        return network

    def freeze(self, generator: torch.Generator | None = None) -> nn.Module:
        """Return a plain network at one weight sample."""
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"`generator` must be a torch.Generator, seeded by manual_seed, got {generator!r}.")
        with torch.no_grad():
            return params.load_(self.mean_module(), self.sample_weights(generator=generator))

    def to_posterior(
        self,
        data: Data,
        *,
        likelihood: str | Likelihood = "categorical",
        temperature: float = 1.0,
        num_data: int | None = None,
        generator: torch.Generator | None = None,
    ) -> VariationalPosterior:
        """Return the posterior of a module that was trained in a custom loop, as `Variational.fit` would.

        It can predict, be saved, compressed, diagnosed and updated. The module is neither trained nor changed.

        Args:
            data: The training data, for the log-likelihood.
            likelihood: The distribution of targets given outputs; the noise of ``"gaussian"`` is fitted to the data.
            temperature: The weight of the KL divergence in the loop and in updates.
            num_data: The number of examples, if the data has no length.
            generator: The source of randomness; by default the same call gives the same numbers.
        """
        from dubito.methods.variational.online import Finished

        options: dict[str, Any] = {"likelihood": likelihood, "num_data": num_data, "generator": generator}
        recipe, network = Finished(self, temperature), self.mean_module()
        found = recipe.fit(network, data, training=Training(epochs=0), progress=False, **options)
        return cast("VariationalPosterior", found)

    def parts(self) -> Iterator[tuple[str, MeanField]]:
        """Yield the posteriors by parameter name, in the order of the selection."""
        for name in self.selection.names:
            part = self.posterior[_key(name)]
            assert isinstance(part, MeanField)
            yield name, part

    def scales(self) -> Tensor:
        """Return the standard deviations of all random weights as one vector, in the order of the selection."""
        return torch.cat([part.scale.detach().flatten() for _, part in self.parts()])

    def _means(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters())

    @contextmanager
    def _one_pass(self) -> Iterator[None]:
        """Load weight samples into the network for one call, during which every layer keeps its samples."""
        for layer in self.layers:
            layer.drawn, layer.calls = {}, 0
        try:
            with self._sampled_weights(), calling_every_layer(self.fused):
                yield
        finally:
            for layer in self.layers:
                layer.drawn = None

    def _sampled_weights(self) -> AbstractContextManager[Any]:
        """Load samples of the weights whose layers do not put the noise on their outputs."""
        if not self.sampled:
            return nullcontext()
        drawn = dict(self.ready)
        self.ready.clear()
        if not drawn:
            means, parts, generator = self._means(), dict(self.parts()), self.weight_noise
            drawn = {name: parts[name].sample(means[name], generator=generator) for name in self.sampled}
        return params.swapped(self.network, drawn)

    @contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Use a generator for the weights of whole calls inside the block, so that all processes draw the same.

        Noise on outputs still comes from the global generator, because each process has its own rows.
        """
        vars(self)["weight_noise"] = generator
        try:
            yield
        finally:
            vars(self)["weight_noise"] = None


@checked_arguments
def kl(module: nn.Module) -> Tensor:
    """Return the total KL divergence of all converted parts of a module."""
    parts = [part.kl() for part in module.modules() if isinstance(part, VariationalModule)]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _key(name: str) -> str:
    """Return a valid module name for a parameter name."""
    return name.replace(".", "/")
