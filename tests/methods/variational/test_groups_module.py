"""Weights that share scales: moments against Monte Carlo and closed forms, in every kind of network, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.objectives import ELBO
from dubito.variational import kl
from torch import Tensor, nn
from variational_cases import Attending, Loop, Reading, Recurrent, Tied

from dubito import priors, select
from dubito.methods.variational import convert
from dubito.methods.variational.groups import GroupModule
from dubito.methods.variational.groups.scales import HorseshoeScales, Scales, make_scales
from dubito.networks.models.sequence import lstm
from oracles import fixed_normal, seeded

PRIORS = [priors.NormalJeffreys(), priors.Horseshoe(0.1), priors.TruncatedLogUniform()]
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: prior.setting_name)
SIZE = 4
DRAWS = 40_000


def stirred(module: Any, seed: int = 0) -> Any:
    """Move every number of the posterior away from its start, so that no two groups are alike."""
    parameters = [p for n, p in module.named_parameters() if not n.startswith("network.")]
    with torch.no_grad():
        for number, value in enumerate(parameters):
            value.add_(0.05 * fixed_normal(*value.shape, seed=seed + number).abs())
    return module


def scales_of(prior: priors.GroupPrior) -> Scales:
    return stirred(make_scales(SIZE, prior, 0.1, torch.zeros((), dtype=torch.float64)))


def converted(model: nn.Module, prior: priors.GroupPrior, **options: Any) -> GroupModule:
    module = convert(model, prior=prior, initial_scale=0.1, **options)
    assert isinstance(module, GroupModule)
    return stirred(module)


def means_of(module: GroupModule) -> dict[str, Tensor]:
    """The means before scaling; `layer.weight` would be a draw."""
    return dict(module.network.named_parameters())


def assert_moments(draws: Tensor, mean: Tensor, variance: Tensor, errors: float = 5.0) -> None:
    """The draws ``[S, ...]`` have this mean and variance, within `errors` standard errors."""
    count, centered = len(draws), draws - draws.mean(0)
    assert bool(((draws.mean(0) - mean).abs() <= errors * (variance / count).sqrt() + 1e-12).all())
    error = ((centered.pow(4).mean(0) - variance.square()).clamp_min(0) / count).sqrt()
    assert bool(((centered.square().mean(0) - variance).abs() <= errors * error + 1e-12).all())


class TestScales:
    @each_prior
    def test_moments(self, prior: priors.GroupPrior, generator: torch.Generator) -> None:
        scales = scales_of(prior)
        draws = scales.sample((200_000,), generator=generator).detach()
        mean, second = scales.mean().detach(), scales.second_moment().detach()
        assert_moments(draws, mean, second - mean.square())
        expected = (draws.var(0) / draws.mean(0).square()).log()
        torch.testing.assert_close(scales.log_alpha().detach(), expected, rtol=0.03, atol=0.03)

    @each_prior
    def test_they_start_at_one(self, prior: priors.GroupPrior) -> None:
        scales = make_scales(SIZE, prior, 0.01, torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(scales.mean().detach(), torch.ones(SIZE).double(), rtol=0, atol=0.02)
        assert float(scales.log_alpha().detach().max()) < -8

    @each_prior
    def test_the_divergence_counts_active_groups(self, prior: priors.GroupPrior) -> None:
        scales, active = scales_of(prior), torch.tensor([True, False, True, True])
        others = scales.kl(~active) - scales.kl(torch.zeros(SIZE, dtype=torch.bool))
        torch.testing.assert_close(scales.kl(active) + others, scales.kl())
        assert float(others.detach()) > 0

    def test_divergence_of_the_horseshoe_by_monte_carlo(self, generator: torch.Generator) -> None:
        scales = HorseshoeScales(1, priors.Horseshoe(0.3), 0.5, torch.zeros((), dtype=torch.float64))
        expected = torch.zeros((), dtype=torch.float64)
        half, one = torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
        densities = {
            "a": torch.distributions.Gamma(half, 1 / (one * 0.3**2)), "a_group": torch.distributions.Gamma(half, one),
            "b": torch.distributions.InverseGamma(half, one), "b_group": torch.distributions.InverseGamma(half, one),
        }  # fmt: skip
        terms = torch.zeros(200_000, dtype=torch.float64)
        for name, density in densities.items():
            mean, variance = (value.detach() for value in scales.moments(name))
            q = torch.distributions.LogNormal(mean, variance.sqrt())
            drawn = (mean + variance.sqrt() * torch.randn(200_000, generator=generator, dtype=torch.float64)).exp()
            terms += q.log_prob(drawn) - density.log_prob(drawn)
        expected = terms.mean()
        assert scales.kl().item() == pytest.approx(expected.item(), abs=5 * terms.std().item() / 200_000**0.5)

    def test_a_horseshoe_shares_the_scale_of_its_layer(self, generator: torch.Generator) -> None:
        scales = scales_of(priors.Horseshoe(0.1))
        logs = scales.sample((100_000,), generator=generator).detach().log()
        shared = (scales.moments("a")[1] + scales.moments("b")[1]).item() / 4
        assert torch.cov(logs.T)[0, 1].item() == pytest.approx(shared, rel=0.05)


class TestWeights:
    @pytest.mark.slow
    @each_prior
    @pytest.mark.parametrize("groups", ["inputs", "outputs"])
    def test_marginals_by_monte_carlo(self, prior: Any, groups: str, generator: torch.Generator) -> None:
        module = converted(seeded(lambda: nn.Linear(3, 2)), prior.replace(groups=groups))
        with torch.no_grad():
            draws = torch.stack([module.sample_weights(generator=generator)["weight"] for _ in range(4_000)])
            assert_moments(draws, module.expected_weights()["weight"], module.variances()["weight"])

    def test_the_variance_of_a_product(self) -> None:
        module = converted(seeded(lambda: nn.Linear(3, 2)), priors.NormalJeffreys())
        (_, scales, _), (_, part) = *module.groups(), *module.fields()
        mean, variance = means_of(module)["weight"], (2 * part.log_scale).exp()  # type: ignore[operator]
        center, spread = scales.mean(), scales.second_moment() - scales.mean().square()
        expected = center**2 * variance + spread * mean**2 + spread * variance
        torch.testing.assert_close(module.variances()["weight"], expected, rtol=1e-12, atol=1e-14)

    def test_all_scales_as_one_vector(self) -> None:
        module = converted(seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))), priors.NormalJeffreys())
        expected = torch.cat([value.sqrt().flatten() for value in module.variances().values()])
        torch.testing.assert_close(module.scales(), expected.detach())
        assert [name for name, _ in module.parts()] == ["0.weight", "1.weight"]

    def test_weights_of_a_group_move_together(self, generator: torch.Generator) -> None:
        model = seeded(lambda: nn.Linear(3, 2))
        for groups, axis in (("inputs", 0), ("outputs", 1)):
            module = converted(model, priors.TruncatedLogUniform(groups=groups))
            ratio = module.sample_weights(generator=generator)["weight"] / means_of(module)["weight"]
            assert torch.allclose(ratio, ratio.narrow(axis, 0, 1).expand_as(ratio))
            assert len(ratio.detach().flatten().round(decimals=9).unique()) == ratio.shape[1 - axis]

    @each_prior
    def test_divergence_is_that_of_weights_and_scales(self, prior: priors.GroupPrior) -> None:
        module = converted(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), prior)
        means = means_of(module)
        expected = sum(scales.kl() for _, scales, _ in module.groups())
        for name, part in module.fields():
            if prior.random_weights:
                expected = expected + priors.Normal().kl(means[name], part.log_scale.exp()).sum()
        torch.testing.assert_close(module.kl(), expected)
        torch.testing.assert_close(kl(nn.Sequential(module)), expected)


def drawn_outputs(module: GroupModule, x: Tensor, equation: str, generator: torch.Generator) -> Tensor:
    """Outputs of one layer ``[S, ...]`` by drawing scales and weights, one joint draw for each output."""
    ((kind, scales, _),), ((_, part),) = list(module.groups()), list(module.fields())
    mean, axis = means_of(module)["weight"].detach(), kind.members[0].axis
    weight = mean.expand(DRAWS, *mean.shape)
    if part.log_scale is not None:
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight = weight + part.log_scale.detach().exp() * noise
    factors = scales.sample((DRAWS,), generator=generator).detach()
    shape = [DRAWS] + [-1 if i == axis else 1 for i in range(mean.ndim)]
    return torch.einsum(equation, weight * factors.reshape(shape), x) + means_of(module)["bias"].detach()


class TestLocal:
    @each_prior
    @pytest.mark.parametrize("groups", ["inputs", "outputs"])
    @pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["row", "positions"])
    def test_outputs_of_a_linear_layer(
        self, prior: Any, groups: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> None:
        layer, x = seeded(lambda: nn.Linear(3, 2)), fixed_normal(*shape)
        module = converted(layer, prior.replace(groups=groups))
        torch.manual_seed(0)
        with torch.no_grad():
            expected = module.mean_module()(x)
            draws = module(x.expand(DRAWS, *shape).contiguous())
        others = drawn_outputs(module, x, "soi,...i->s...o", generator)
        for found in (draws, others):
            assert bool(((found.mean(0) - expected).abs() <= 5 * found.std(0) / DRAWS**0.5).all())
        torch.testing.assert_close(draws.var(0), others.var(0), rtol=0.06, atol=1e-9)

    @each_prior
    @pytest.mark.parametrize("groups", ["auto", "inputs"])
    def test_outputs_of_a_convolution(self, prior: Any, groups: str, generator: torch.Generator) -> None:
        """At one position; noise of different positions is independent, as always in local reparameterization."""
        layer, x = seeded(lambda: nn.Conv2d(2, 3, 2)), fixed_normal(2, 2, 2)
        module = converted(layer, prior.replace(groups=groups))
        torch.manual_seed(0)
        with torch.no_grad():
            expected = module.mean_module()(x[None])[0].flatten()
            draws = module(x.expand(DRAWS, 2, 2, 2).contiguous()).flatten(1)
        others = drawn_outputs(module, x, "soikl,ikl->so", generator)
        assert bool(((draws.mean(0) - expected).abs() <= 5 * draws.std(0) / DRAWS**0.5).all())
        torch.testing.assert_close(draws.var(0), others.var(0), rtol=0.06, atol=1e-9)

    def test_every_example_has_scales_of_its_own(self) -> None:
        module = converted(seeded(lambda: nn.Linear(3, 2)), priors.TruncatedLogUniform())
        outputs = module(fixed_normal(3).expand(50, 3))
        assert len(outputs.detach()[:, 0].unique()) == 50

    def test_without_a_batch_axis(self) -> None:
        for make, x in (
            (lambda: nn.Linear(3, 2), fixed_normal(3)),
            (lambda: nn.Conv2d(2, 2, 2), fixed_normal(2, 3, 3)),
        ):
            module = converted(seeded(make), priors.NormalJeffreys())
            assert module(x).shape == seeded(make)(x).shape


NETWORKS: dict[str, tuple[Any, Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), fixed_normal(5, 3)),
    "grouped": (lambda: nn.Conv2d(4, 2, 2, groups=2), fixed_normal(2, 4, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, groups=1), fixed_normal(2, 2, 3, 3)),
    "tied": (Tied, torch.tensor([[0, 4, 4], [2, 1, 0]])),
    "reading": (Reading, torch.tensor([[0, 4, 4], [2, 1, 0]])),
    "loop": (Loop, fixed_normal(2, 3, 2)),
    "lstm": (lambda: Recurrent(nn.LSTM), fixed_normal(2, 4, 3)),
    "gru": (lambda: Recurrent(nn.GRU), fixed_normal(2, 4, 3)),
    "attention": (Attending, fixed_normal(2, 3, 4)),
    "words": (lambda: lstm(6, 2, width=3, embedding=4, dropout=0.0), torch.tensor([[1, 4, 4], [2, 1, 0]])),
}


@pytest.mark.parametrize("name", NETWORKS)
@each_prior
class TestEveryNetwork:
    def test_it_runs_learns_and_comes_back(self, prior: priors.GroupPrior, name: str) -> None:
        make, x = NETWORKS[name]
        model = seeded(make)
        before = copy.deepcopy(model.state_dict())
        module = converted(model, prior)
        assert not torch.equal(module(x), module(x))
        loss = module(x).square().sum() + module.kl()
        slopes = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        assert all(slope is not None and bool(slope.isfinite().all()) for slope in slopes)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        plain = module.mean_module()
        assert type(plain) is type(model)
        assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert torch.equal(plain(x), plain(x))

    def test_copies_and_states(self, prior: priors.GroupPrior, name: str) -> None:
        make, x = NETWORKS[name]
        module = converted(seeded(make), prior)
        twin, other = copy.deepcopy(module), convert(seeded(make, seed=1), prior=prior)
        other.load_state_dict(module.state_dict())
        results = []
        for each in (module, twin, other):
            torch.manual_seed(4)
            results.append((each(x), each.kl()))
        for result in results[1:]:
            assert torch.equal(result[0], results[0][0])
            assert torch.equal(result[1], results[0][1])

    def test_a_frozen_network_is_a_draw(self, prior: priors.GroupPrior, name: str) -> None:
        make, x = NETWORKS[name]
        module = converted(seeded(make), prior)
        first, second = (module.freeze(torch.Generator().manual_seed(2)) for _ in range(2))
        assert torch.equal(first(x), second(x))
        assert not torch.equal(first(x), module.mean_module()(x))


class TestGroups:
    def names(self, model: nn.Module, **options: Any) -> dict[str, int]:
        module = converted(model, priors.NormalJeffreys(**options))
        return {kind.name: kind.size for kind, _, _ in module.groups()}

    def test_of_a_convolutional_network(self) -> None:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 5)))
        assert self.names(model) == {"0.outputs": 4, "2.inputs": 16}
        assert self.names(model, groups="inputs") == {"0.inputs": 1, "2.inputs": 16}
        assert self.names(model, groups="outputs") == {"0.outputs": 4, "2.outputs": 5}

    def test_a_grouped_or_transposed_convolution_is_grouped_where_its_channels_share_an_axis(self) -> None:
        assert self.names(seeded(lambda: nn.Conv2d(4, 2, 2, groups=2)), groups="inputs") == {"outputs": 2}
        assert self.names(seeded(lambda: nn.ConvTranspose2d(4, 2, 2))) == {"outputs": 2}
        assert self.names(seeded(lambda: nn.ConvTranspose2d(4, 2, 2, groups=2))) == {"inputs": 4}

    def test_of_a_recurrent_classifier(self) -> None:
        model = seeded(lambda: lstm(6, 2, width=3, embedding=4))
        expected = {"lstm.inputs_l0": 4, "lstm.hidden_l0": 3, "lstm.gates_l0": 12, "tokens.inputs": 6, "head.inputs": 3}
        assert self.names(model) == expected

    def test_a_gate_has_one_scale_in_both_matrices(self, generator: torch.Generator) -> None:
        model = seeded(lambda: lstm(6, 2, width=3, embedding=4))
        module = converted(model, priors.TruncatedLogUniform(groups="outputs"))
        drawn, means = module.sample_weights(generator=generator), means_of(module)
        ratios = [(drawn[n] / means[n])[:, 0] for n in ("lstm.weight_ih_l0", "lstm.weight_hh_l0")]
        torch.testing.assert_close(*ratios)
        assert len(ratios[0].detach().round(decimals=9).unique()) == 12

    def test_padding_is_no_word(self) -> None:
        module = converted(seeded(lambda: lstm(6, 2, width=3, embedding=4)), priors.NormalJeffreys())
        active = {kind.name: mask for kind, _, mask in module.groups()}
        assert active["tokens.inputs"].tolist() == [False, True, True, True, True, True]
        assert torch.equal(module.sample_weights()["tokens.weight"][0], means_of(module)["tokens.weight"][0])
        assert not module.variances()["tokens.weight"][0].any()

    def test_a_part_of_the_weights(self) -> None:
        model = seeded(lambda: nn.Linear(4, 3))
        mask = torch.zeros(3, 4, dtype=torch.bool)
        mask[:, 1:] = True
        module = converted(model, priors.NormalJeffreys(), weights=select.mask({"weight": mask}), rest="hold")
        drawn = module.sample_weights()["weight"]
        assert torch.equal((drawn == model.weight), ~mask)
        slope = torch.autograd.grad(drawn.sum(), means_of(module)["weight"])[0]
        assert torch.equal(slope != 0, mask)
        assert [active.tolist() for _, _, active in module.groups()] == [[False, True, True, True]]


def test_whole_draws_can_come_from_a_generator() -> None:
    """So several processes have the same weights, whatever their own noise is."""
    make, x = NETWORKS["words"]
    module = converted(seeded(make), priors.NormalJeffreys(), estimator="weight")
    outputs = []
    for _ in range(2):
        torch.rand(1)
        with module.drawing_from(torch.Generator().manual_seed(0)):
            outputs.append(module(x))
    assert torch.equal(*outputs)


class TestRefusals:
    def test_one_sentence_each(self) -> None:
        model, prior = nn.Linear(3, 2), priors.NormalJeffreys()
        with pytest.raises(InputError, match="needs estimator='local' or 'weight'"):
            convert(model, prior=prior, estimator="flipout")
        with pytest.raises(InputError, match="'bias' is a vector"):
            convert(model, prior=prior, biases="random")
        with pytest.raises(InputError, match="needs one number as initial_scale"):
            convert(model, prior=prior, initial_scale={"weight": torch.ones(2, 3)})
        with pytest.raises(InputError, match="without any other prior"):
            convert(model, prior=priors.ByName({"*": prior}))

    def test_a_draw_has_no_density(self) -> None:
        module = convert(nn.Linear(3, 2), prior=priors.NormalJeffreys(), estimator="weight")
        with pytest.raises(UnsupportedError, match="no closed form"):
            module.log_ratio(module.sample_weights())


def test_the_bound_of_a_batch() -> None:
    """The loss is the mean negative log-likelihood plus the divergence over the number of data."""
    module = converted(seeded(lambda: nn.Linear(3, 2)), priors.Horseshoe())
    x, y = fixed_normal(4, 3), torch.tensor([0, 1, 1, 0])
    torch.manual_seed(1)
    loss = ELBO()(module, x, y, num_data=40)
    torch.manual_seed(1)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(module(x), y) + module.kl() / 40)
