"""What a training step shares: nodes of the graph with written-out gradients, the same as the parts they replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from variational_cases import NETWORKS, mlp

from dubito import priors, select
from dubito.methods.variational import convert
from dubito.methods.variational.fused import DenseOutput, NormalDraw, NormalMoments, NormalOutput
from oracles import fixed_normal, seeded


class TestSharedMoments:
    """A training step computes mean, variance and KL divergence together, with the same values and gradients."""

    CASES = (
        ("mlp", {}),
        ("mlp", {"prior": priors.Normal(0.3, 0.7), "biases": "random"}),
        ("mlp", {"prior": priors.Normal("model", 0.7)}),
        ("mlp", {"prior": priors.Normal(0.0, "learn")}),
        ("mlp", {"prior": priors.LogUniform(), "weights": select.random(6), "biases": "random"}),
        ("mlp", {"estimator": "flipout"}),
        ("mlp", {"estimator": "weight"}),
        ("token", {"estimator": "weight", "prior": priors.Normal(0.3, 0.7), "biases": "random"}),
        ("mlp", {"estimator": "weight", "prior": priors.Laplace(), "weights": select.random(6), "biases": "random"}),
        ("lstm", {"estimator": "weight", "prior": priors.Normal("model", 0.7)}),
        ("convolutional", {}),
        ("convolutional", {"prior": priors.LogUniform(), "biases": "random"}),
        ("loop", {}),
        ("attention", {}),
        ("tied", {}),
        ("lstm", {"biases": "random"}),
        ("transformer_encoder", {"biases": "random"}),
    )

    @pytest.mark.parametrize("rows", [None, 1])  # of a single row, slopes of outputs and biases may be one tensor
    @pytest.mark.parametrize(("name", "options"), CASES, ids=str)
    def test_the_same_as_apart(self, name: str, options: Any, rows: int | None) -> None:
        make, x = NETWORKS[name]
        x = x[:rows]
        module = convert(seeded(make).eval(), initial_scale=0.3, **options)
        module(x)  # the first call finds the layers that are used several times
        results = []
        for shared in (False, True):
            torch.manual_seed(0)
            if shared:
                with module.shared_moments() as kl:
                    output = module(x)
            else:
                output, kl = module(x), module.kl()
            slopes = torch.autograd.grad(output.square().sum() + 0.1 * kl, list(module.parameters()), allow_unused=True)
            results.append((output, kl, slopes))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)

    def test_nothing_is_kept(self) -> None:
        module = convert(seeded(mlp))
        with module.shared_moments():
            assert all(layer.moments for layer in module.layers)
        assert all(layer.moments is None for layer in module.layers)
        copy.deepcopy(module)

    def test_only_the_first_call_has_the_draw_of_the_divergence(self) -> None:
        module, x = convert(seeded(mlp), estimator="weight", initial_scale=0.3), fixed_normal(4, 3)
        with module.shared_moments():
            first, second = module(x), module(x)
        assert not torch.equal(first, second)
        assert not module.ready

    def test_the_written_out_gradients(self) -> None:
        tensors = [fixed_normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(3, 2), (4,)] * 2)]
        noises, numbers = [fixed_normal(3, 2, seed=5), fixed_normal(4, seed=6)], [(0.3, 0.7), (0.0, 2.0)]
        draw = lambda *given: NormalDraw.apply(numbers, [noise.clone() for noise in noises], *given)  # noqa: E731
        assert torch.autograd.gradcheck(draw, tensors)
        assert torch.autograd.gradcheck(lambda *given: NormalMoments.apply(numbers, *given), tensors)

    @pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    def test_the_written_out_gradient_of_outputs(self, shape: tuple[int, ...], bias: bool) -> None:
        x, weight = fixed_normal(*shape).requires_grad_(), fixed_normal(2, 3, seed=1).requires_grad_()
        variance, offset = (
            fixed_normal(2, 3, seed=2).square().requires_grad_(),
            fixed_normal(2, seed=3).requires_grad_(),
        )
        given = (x, weight, variance, offset) if bias else (x, weight, variance)

        def dense(x: Tensor, weight: Tensor, variance: Tensor, offset: Tensor | None = None) -> Tensor:
            torch.manual_seed(0)
            return DenseOutput.apply(x, weight, variance, offset)

        def apart(x: Tensor, weight: Tensor, variance: Tensor, offset: Tensor | None = None) -> Tensor:
            torch.manual_seed(0)
            return NormalOutput.apply(F.linear(x, weight, offset), F.linear(x.square(), variance))

        assert torch.autograd.gradcheck(dense, given)
        assert torch.autograd.gradcheck(apart, given)
        torch.testing.assert_close(dense(*given), apart(*given), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("estimator", ["local", "weight"])
    def test_the_graph_can_be_kept(self, estimator: Any) -> None:
        """A pass back that frees the graph uses the memory of what was saved; one that keeps it does not."""
        make, x = NETWORKS["convolutional"]
        module = convert(seeded(make).eval(), estimator=estimator, initial_scale=0.3)
        with module.shared_moments() as kl:
            loss = module(x).square().sum() + 0.1 * kl
        values = [value for value in module.parameters() if value.requires_grad]
        first, second = (torch.autograd.grad(loss, values, retain_graph=True, allow_unused=True) for _ in range(2))
        last = torch.autograd.grad(loss, values, allow_unused=True)
        torch.testing.assert_close([first, second], [last, last], rtol=1e-12, atol=1e-12)

    def test_in_lower_precision(self) -> None:
        """Where torch casts on its own, the dense node leaves the work to the layer."""
        module = convert(seeded(mlp).float(), initial_scale=0.3)
        with torch.autocast("cpu", dtype=torch.bfloat16), module.shared_moments() as kl:
            output = module(fixed_normal(4, 3).float())
        assert output.dtype == torch.bfloat16
        slopes = torch.autograd.grad(output.float().square().sum() + 0.1 * kl, list(module.parameters()))
        assert all(slope.dtype == torch.float32 and bool(slope.isfinite().all()) for slope in slopes)
