"""Posteriors of networks that were trained in a loop of the user's own equal those of our loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dubito.ensembles import Averager
from dubito.errors import InputError
from dubito.mcmc import SamplingOptimizer
from dubito.rank1 import convert
from torch import Tensor, nn

from dubito import SWAG, BatchEnsemble, Ensemble, Rank1, Training, select
from dubito.methods.mcmc.kernels import KernelStep, make_kernel

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1)
ONE_BATCH: dict[str, Any] = {
    "lr": 0.1, "batch_size": 60, "shuffle": False, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0,
}  # fmt: skip


def network(norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 3))


def mean_loss(outputs: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(each, Y) for each in outputs]).mean()


class TestRank1:
    @pytest.mark.parametrize(
        "recipe",
        [
            BatchEnsemble(3),
            BatchEnsemble(2, normalization="component"),
            Rank1(components=2, family="delta", prior=None, perturbation="additive"),
            BatchEnsemble(2, weights=select.last_layer()),
        ],
        ids=repr,
    )
    def test_it_predicts_as_the_trained_module(self, recipe: Any) -> None:
        module = convert(network(norm=True), recipe, inputs=X[:2]).train()
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            mean_loss(module(X)).backward()
            optimizer.step()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        posterior = module.to_posterior((X, Y))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert posterior.recipe == recipe
        with torch.no_grad():
            expected = module.eval()(X).softmax(-1).mean(0)
        torch.testing.assert_close(posterior.predict(X).probs, expected, rtol=1e-5, atol=1e-6)

    def test_a_step_is_that_of_our_loop(self) -> None:
        recipe = BatchEnsemble(2, batch="repeat", spread=0.0, weight_decay=0.0)  # both start at the same factors
        ours = recipe.fit(network(), (X, Y), training=Training(epochs=1, **ONE_BATCH), progress=False)
        module = convert(network(), recipe)
        mean_loss(module(X)).backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        theirs = module.to_posterior((X, Y))
        torch.testing.assert_close(theirs.predict(X).probs, ours.predict(X).probs, rtol=1e-5, atol=1e-6)

    def test_regression_and_files(self, tmp_path: Any) -> None:
        import dubito

        module = convert(network(), Rank1(components=2))
        posterior = module.to_posterior((X, X[:, :3]), likelihood="gaussian")
        assert isinstance(posterior.likelihood.noise, float)  # type: ignore[attr-defined]
        posterior.save(tmp_path / "rank1")
        again = dubito.load(tmp_path / "rank1", network())
        assert torch.equal(again.predict(X).mean, posterior.predict(X).mean)  # type: ignore[attr-defined]


class TestAverager:
    def test_it_collects_what_our_loop_does(self) -> None:
        recipe = SWAG(rank=3, burn_in=0.25, collect_every=1, lr=0.1)
        ours = recipe.fit(network(), (X, Y), training=Training(epochs=8, **ONE_BATCH), progress=False)
        model = network()
        averager, optimizer = Averager(model, recipe), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            if step >= 2:
                averager.collect()
        theirs = averager.to_posterior((X, Y))
        assert averager.count == 6
        for one, other in zip(theirs.marginals(), ours.marginals(), strict=True):
            for name, value in one.items():
                torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(theirs.deviations, ours.deviations, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]

    def test_two_networks_are_needed(self) -> None:
        averager = Averager(network())
        averager.collect()
        with pytest.raises(InputError, match="at least 2 collected networks, got 1"):
            averager.to_posterior((X, Y))


class TestSamplingOptimizer:
    @pytest.mark.parametrize("kernel", ["sgld", "psgld", "sghmc", "sgnht"])
    def test_a_step_is_a_transition_of_the_kernel(self, kernel: Any) -> None:
        model, generator = network(), torch.Generator().manual_seed(5)
        optimizer = SamplingOptimizer(
            model.parameters(), 0.01, num_data=60, kernel=kernel, burn_in=2, prior_precision=2.0,
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        flat = torch.cat([value.detach().flatten() for value in model.parameters()])
        own, chain = make_kernel(kernel, 0.1), copy.deepcopy(model)
        state = own.init(flat)
        for number in range(3):
            for each in (model, chain):
                each.zero_grad()
                F.cross_entropy(each(X), Y).backward()
            optimizer.step()
            gradient = 60 * torch.cat([value.grad.flatten() for value in chain.parameters()]) + 2.0 * flat
            noise = torch.empty_like(flat).normal_(generator=generator)
            own.move(flat, state, gradient, noise, KernelStep(0.01 / 60, 1.0, number < 2, number))
            torch.nn.utils.vector_to_parameters(flat.clone(), chain.parameters())
        found = torch.cat([value.detach().flatten() for value in model.parameters()])
        torch.testing.assert_close(found, flat, rtol=1e-5, atol=1e-6)

    def test_it_samples_a_normal_posterior(self) -> None:
        weights = nn.Parameter(torch.zeros(400, dtype=torch.float64))  # 400 chains of w, with precision 100·0.5 + 1
        optimizer = SamplingOptimizer([weights], 0.4, num_data=100)
        kept = []
        for step in range(300):
            optimizer.zero_grad()
            (0.25 * weights.square()).sum().backward()
            optimizer.step()
            if step >= 100:
                kept.append(weights.detach().clone())
        variance = float(torch.stack(kept).square().mean())
        assert abs(variance * 51 - 1) < 0.05  # 400 chains of about 20 independent draws: one standard error is 0.016

    def test_it_is_saved_and_continued(self) -> None:
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        first, second = (SamplingOptimizer([each], 0.1, num_data=10, temperature=0.0) for each in weights)
        for each in (weights[0], weights[0]):
            each.grad = each.detach().clone()
            first.step()
        weights[1].data.copy_(weights[0].data)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for each, optimizer in zip(weights, (first, second), strict=True):
            each.grad = each.detach().clone()
            optimizer.step()
        assert torch.equal(*weights)

    def test_samples_become_a_posterior(self) -> None:
        model = network()
        optimizer, kept = SamplingOptimizer(model.parameters(), 0.01, num_data=60), []
        for step in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            if step % 4 == 3:
                kept.append(copy.deepcopy(model))
        assert float(Ensemble.of(kept, data=(X, Y)).predict(X).epistemic.min()) >= 0.0

    def test_bad_settings_are_one_sentence(self) -> None:
        for wrong in ({"num_data": 0}, {"num_data": 10, "kernel": "hmc"}, {"num_data": 10, "temperature": -1.0}):
            with pytest.raises(InputError, match="must be"):
                SamplingOptimizer(network().parameters(), 0.1, **wrong)
