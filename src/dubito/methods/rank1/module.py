"""A network with K components as a plain `nn.Module`, for training loops of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.fitting.checks import outputs_of
from dubito.fitting.working_copies import private_copy
from dubito.methods.rank1 import families
from dubito.methods.rank1.composite_layers import FactoredAttention, FactoredLSTM
from dubito.methods.rank1.layers import Factored, FactoredLayer, make_factored
from dubito.methods.rank1.norm import ComponentNorm, make_component_norms
from dubito.methods.rank1.sites import Layout, find_layout, scalable_rule, unselected, without_batch_axis
from dubito.networks.swapping import calling_every_layer, fused_modules, restore_class, switch_off_checkpointing
from dubito.networks.twin import light_copy

if TYPE_CHECKING:
    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data
    from dubito.methods.rank1.posterior import Rank1Posterior
    from dubito.methods.rank1.recipe import BatchEnsemble, Rank1

Blocks = list[tuple[int, int]]  # the components of the rows of a batch: pairs of component and number of rows
_MIXINS: dict[str, type[Factored]] = {"layer": FactoredLayer, "attention": FactoredAttention, "lstm": FactoredLSTM}


class Rank1Module(nn.Module):
    r"""A network whose weights are $W \circ r_k s_k^\top$ in component k, with factors drawn for each example.

    `network` keeps the names of the user's parameters; the biases of its factored layers are not used, because every
    component has its own. `loc` and `log_scale` hold all factors of all layers, `bias` all biases.

    Args:
        network: A private copy of the network, which is changed in place.
        layout: The sites of the factors.
        recipe: The settings.
        generator: The source of the initial factors; by default the global one.
    """

    log_scale: nn.Parameter | None
    frozen: Tensor | None
    frozen_biases: Tensor | None

    def __init__(
        self, network: nn.Module, layout: Layout, recipe: Rank1, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        biases = layout.biases_of(network)
        self.layout, self.recipe, self.network = layout, recipe, network
        self.settings: Rank1 | BatchEnsemble = recipe  # as the user gave them, for `to_posterior`
        self.left_out: tuple[str, ...] = ()  # layers without factors
        self.loc = nn.Parameter(initial_locations(recipe, sum(layout.factor_sizes), biases, generator))
        self.log_scale = None
        if recipe.family != "delta":
            rows = recipe.components if recipe.scales == "component" else 1
            self.log_scale = nn.Parameter(torch.full_like(self.loc[:rows], recipe.initial_scale).log())
        self.bias = nn.Parameter(biases.expand(recipe.components, -1).clone())
        own = dict(network.named_parameters())
        moves = [torch.full_like(own[n].flatten(), own[n].requires_grad) for n in layout.bias_names]
        frozen = torch.cat([biases.new_empty(0), *moves]) == 0
        self.register_buffer("frozen", frozen if bool(frozen.any()) else None, persistent=False)
        self.register_buffer("frozen_biases", biases.clone() if bool(frozen.any()) else None, persistent=False)
        for name in layout.bias_names:
            own[name].requires_grad_(False)
        modules = dict(network.named_modules())
        for site in layout.sites:
            module = modules[site.name]
            extra = {"rule": scalable_rule(module)} if site.kind == "layer" else {}
            make_factored(module, _MIXINS[site.kind], site.name, recipe.perturbation, **extra)
        self.places = [modules[site.name] for site in layout.sites]
        self.fused = fused_modules(network)
        per_component = recipe.normalization == "component"
        self.norms = make_component_norms(network, recipe.components) if per_component else {}

    @property
    def scale(self) -> Tensor | None:
        """The scales of the factors ``[K, D]`` or ``[1, D]``; None for point estimates."""
        return None if self.log_scale is None else self.log_scale.exp()

    def biases(self) -> Tensor:
        """Return the biases ``[K, E]`` of the components; frozen ones are the network's own."""
        if self.frozen is None or self.frozen_biases is None:
            return self.bias
        return torch.where(self.frozen, self.frozen_biases, self.bias)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of all components for all examples, ``[K, B, ...]``."""
        if args and kwargs:
            raise InputError("Give a rank-1 module all its inputs by position, or all of them by name.")
        return self.all_components(kwargs if kwargs else args)

    def all_components(self, inputs: Any, *, once: bool = False) -> Tensor:
        """Return the outputs ``[K, B, ...]`` for one batch, with one sample of the factors per example; see `run`."""
        count, rows = self.recipe.components, batches.num_rows(inputs)
        repeated = batches.map_leaves(lambda leaf: leaf.repeat(count, *[1] * (leaf.ndim - 1)), inputs)
        return self.run(repeated, [(k, rows) for k in range(count)], once=once).unflatten(0, (count, rows))

    def run(self, inputs: Any, blocks: Blocks, *, once: bool = False) -> Tensor:
        """Return the outputs ``[N, ...]`` of rows whose components are given by `blocks`.

        With `once` they may be differentiated at most once, which is faster.
        """
        blocks = [(k, rows) for k, rows in blocks if rows]
        index = torch.tensor([k for k, _ in blocks], device=self.loc.device)
        biases = _by_row(self.biases().index_select(0, index), blocks)
        return self.run_with(inputs, blocks, self._draw(index, blocks), biases, once=once)

    def run_with(
        self,
        inputs: Any,
        blocks: Blocks,
        factors: Tensor,
        biases: Tensor,
        *,
        once: bool = False,
        narrow: int | None = None,
        stacked: bool = False,
    ) -> Tensor:
        """Return the outputs at given factors and biases; see `SiteValues` for their shapes.

        With `narrow`, the number of rows of one block, the inputs are those of one block, which all blocks share. With
        `stacked` as well, the outputs have an axis of blocks.
        """
        examples = None if factors.ndim == 1 else sum(rows for _, rows in blocks)
        for norm in self.norms.values():
            norm.blocks = blocks
        for place, (_, values) in zip(self.places, self.layout.split(factors, biases, once=once), strict=True):
            vars(place).update(values=values, examples=examples, narrow=narrow, stacked=stacked)
        try:
            with calling_every_layer([] if self.training else self.fused):
                return params.call(self.network, inputs)
        finally:
            for place in self.places:
                vars(place)["values"] = None

    def component_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of normalization layers with one slice per component, by the user's names."""
        found: dict[str, Tensor] = {}
        for name, norm in self.norms.items():
            own = {**norm._parameters, **norm._buffers}
            found |= {f"{name}.{key}": v.detach() for key, v in own.items() if v is not None and v.ndim}
        return found

    def draw(self, blocks: Blocks) -> Tensor:
        """Draw factors for each row ``[N, D]``, or for each of several equal blocks if its rows share them."""
        return self._draw(torch.tensor([k for k, _ in blocks], device=self.loc.device), blocks)

    def _draw(self, index: Tensor, blocks: Blocks) -> Tensor:
        family, loc, scale = self.recipe.family, self.loc.index_select(0, index), self.scale
        if scale is not None and len(scale) > 1:
            scale = scale.index_select(0, index)
        if scale is None or self.recipe.sample == "batch":
            return _by_row(families.draw(family, loc, scale), blocks)
        if not _even(blocks):
            return families.draw(family, _by_row(loc, blocks), scale if len(scale) == 1 else _by_row(scale, blocks))
        # Normal draws are slow, so blocks share them up to random signs, which makes different blocks uncorrelated.
        signs = torch.empty_like(loc).random_(2).mul_(2).sub_(1)
        shape = (blocks[0][1], loc.shape[1])
        return families.draw(family, loc.unsqueeze(1), (scale * signs).unsqueeze(1), shape=shape).flatten(0, 1)

    def kl(self, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Return the KL divergence of the mixture from the prior: a bound, exact for one component.

        It is convex: $\mathrm{KL}(\frac1K \sum_k q_k \| p) \le \frac1K \sum_k \mathrm{KL}(q_k \| p)$. With
        ``mixture_kl="sum"`` it is K times that.
        """
        recipe = self.recipe
        total = families.kl_divergence(recipe.family, recipe.prior, self.loc, self.log_scale, generator=generator)
        return total if recipe.mixture_kl == "sum" else total / recipe.components

    def plain_network(self) -> nn.Module:
        """Return a copy of the network with the user's own classes, at the means of the components."""
        network = light_copy(self.network)
        for module in network.modules():
            if isinstance(module, Factored):
                own = ("values", "examples", "narrow", "stacked", "perturbation", "label", "rule")
                restore_class(module, tuple(name for name in own if name in vars(module)))
            elif isinstance(module, ComponentNorm):
                restore_class(module, ("blocks", "rule"))
        for name, value in self.component_tensors().items():
            owner, _, key = name.rpartition(".")
            module = network.get_submodule(owner)
            if key in module._buffers:
                module._buffers[key] = value.mean(0)
            else:
                module.register_parameter(key, nn.Parameter(value.mean(0)))
        weights = dict(network.named_parameters())
        frozen = torch.zeros(sum(self.layout.bias_sizes)) if self.frozen is None else self.frozen.cpu()
        sizes, means = self.layout.bias_sizes, self.biases().detach().mean(0)
        for name, bias, fixed in zip(self.layout.bias_names, means.split(sizes), frozen.split(sizes), strict=True):
            weights[name].data.copy_(bias.view_as(weights[name]))
            weights[name].requires_grad_(not bool(fixed.any()))
        return network

    def to_posterior(
        self,
        data: Data,
        *,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Rank1Posterior:
        """Return the posterior of a module that was trained in a custom loop, as the recipe's `fit` would.

        The module is neither trained nor changed.

        Args:
            data: The training data; the noise of ``"gaussian"`` is fitted to it.
            likelihood: The distribution of targets given outputs.
            num_data: The number of examples, if the data has no length.
            generator: The source of randomness; by default the same call gives the same numbers.
        """
        from dubito.fitting.training import Training
        from dubito.methods.rank1.trainer import FinishedRank1

        options: dict[str, Any] = {"likelihood": likelihood, "num_data": num_data, "generator": generator}
        found = FinishedRank1(self).fit(
            self.plain_network(), data, training=Training(epochs=0), progress=False, **options
        )
        return cast("Rank1Posterior", found)


@checked_arguments
def convert(
    model: nn.Module,
    recipe: Rank1 | BatchEnsemble | None = None,
    *,
    inputs: Any = None,
    generator: torch.Generator | None = None,
) -> Rank1Module:
    """Return a copy of any network as a mixture of K components, as a plain module.

    ``module(x)`` is ``[K, B, ...]``, so a loss is ``-log_prob(module(x), y).mean() + module.kl() / num_data``. After
    training, ``module.to_posterior(data)`` is the posterior. The model itself is not changed.

    Args:
        model: Any network.
        recipe: A `Rank1` or `BatchEnsemble`; its settings of the training loop are ignored.
        inputs: A batch of inputs, by which layers without a batch axis are found and left out; without inputs, such a
            layer raises an error when it is called.
        generator: The source of the initial factors; by default the global one.

    >>> module = convert(nn.Linear(3, 2))
    >>> module(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    from dubito.methods.rank1.recipe import Rank1

    given = recipe or Rank1()
    recipe = given.as_rank1()
    network = private_copy(model)
    switch_off_checkpointing(network)
    others = () if recipe.weights is None else unselected(network, recipe.weights.resolve(network))
    layout = find_layout(network, recipe.factors, others)
    if inputs is not None:
        outputs_of(network, batches.as_tensors(inputs))
        others = (*others, *without_batch_axis(network.eval(), layout, inputs))
        layout = find_layout(network, recipe.factors, others)
    module = Rank1Module(network, layout, recipe, generator=generator).train(model.training)
    module.settings, module.left_out = given, tuple(others)
    return module


def initial_locations(recipe: Rank1, size: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the initial locations ``[K, D]`` of the factors: random signs, or near 1."""
    device = like.device if generator is None else generator.device
    blank = torch.empty(recipe.components, size, dtype=like.dtype, device=device)
    can_be_negative = recipe.family != "log-normal" and recipe.perturbation == "multiplicative"
    if recipe.start == "fresh" and recipe.initial == "sign" and can_be_negative:
        return blank.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(like.device)
    spread = recipe.spread if recipe.components > 1 else 0.0
    near = blank.normal_(generator=generator).mul_(spread)
    return (near if recipe.family == "log-normal" else near.add_(1)).to(like.device)


def split_blocks(rows: int, components: int, first: int) -> Blocks:
    """Divide the rows of a batch among the components as evenly as possible, beginning with component `first`.

    >>> split_blocks(7, 3, first=1)
    [(1, 3), (2, 2), (0, 2)]
    """
    small, more = divmod(rows, components)
    return [((first + i) % components, small + (i < more)) for i in range(components)]


def _even(blocks: Blocks) -> bool:
    return all(rows == blocks[0][1] for _, rows in blocks)


def _by_row(vectors: Tensor, blocks: Blocks) -> Tensor:
    """Repeat the vectors ``[M, C]`` of blocks for their rows; those of equal blocks are broadcast instead."""
    if _even(blocks):
        return vectors
    return torch.cat([vector.expand(rows, -1) for vector, (_, rows) in zip(vectors, blocks, strict=True)])
