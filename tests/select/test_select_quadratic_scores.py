"""Both numbers per weight as forms of the same columns, against the dense forms of the outputs."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Likelihood
from subnetwork_cases import case, centred
from torch import Tensor

from dubito.core import limits
from dubito.core.batches import Source
from dubito.select.directions import direction_columns
from dubito.select.quadratic_scores import ScoreForms
from dubito.select.scores import Scores, measure
from oracles import Case, curvature, jacobian


def both(likelihood: Likelihood, outputs: Tensor, targets: Tensor, gradients: Tensor) -> Tensor:
    """Both forms ``[B, 2, X]`` of the Jacobian ``[B, T·C, X]`` of outputs in the canonical layout."""
    forms = ScoreForms.of(likelihood, outputs, targets)
    assert forms is not None
    columns = forms.columns.flatten(2).transpose(0, 1)  # [B, V, T·C]
    return forms(columns @ gradients)


def dense(likelihood: Likelihood, outputs: Tensor, targets: Tensor, gradients: Tensor) -> Tensor:
    """The same from all outputs and their Hessian."""
    apart = gradients.unflatten(1, (-1, outputs.shape[-1]))  # [B, T, C, X]
    hessian = likelihood.hessian(outputs, targets).reshape(*apart.shape[:3], -1)
    moved = apart - apart.mean(2, keepdim=True) if isinstance(likelihood, Categorical) else apart
    kept = likelihood.observed(targets)
    if kept is not None:
        moved = moved * kept.reshape(*apart.shape[:2], 1, 1)
    return torch.stack([moved.square().sum((1, 2)), torch.einsum("btcx,btcd,btdx->bx", apart, hessian, apart)], 1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("shape", [(6, 2), (6, 5), (6, 3, 4)])
def test_a_softmax_has_the_dense_forms(shape: tuple[int, ...], spread: float) -> None:
    torch.manual_seed(0)
    outputs, gradients = spread * torch.randn(shape).double(), torch.randn(6, math.prod(shape[1:]), 7).double()
    likelihood, targets = Categorical(), torch.randint(shape[-1], shape[:-1])
    targets.flatten()[0] = -100
    found, expected = both(likelihood, outputs, targets, gradients), dense(likelihood, outputs, targets, gradients)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-11)
    assert bool((found[1:] > 0).all())


@pytest.mark.parametrize("likelihood", [Bernoulli(), HeteroscedasticGaussian()])
def test_outputs_that_do_not_interact_have_the_dense_forms(likelihood: Likelihood) -> None:
    torch.manual_seed(1)
    outputs, gradients = torch.randn(6, 4).double(), torch.randn(6, 4, 7).double()
    targets = likelihood.sample(outputs)
    found, expected = both(likelihood, outputs, targets, gradients), dense(likelihood, outputs, targets, gradients)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("margin", [0.0, 1.0, 20.0, 60.0])
@pytest.mark.parametrize("num_classes", [2, 10, 33])
def test_single_precision_is_enough_for_unsure_and_for_sure_networks(num_classes: int, margin: float) -> None:
    """From equal probabilities to others of 1e-26, up to the most classes that go through one product."""
    torch.manual_seed(2)
    outputs, gradients = 0.1 * torch.randn(50, num_classes), torch.randn(50, num_classes, 40)
    targets = torch.randint(num_classes, (50,))
    outputs[torch.arange(50), targets] += margin
    found = both(Categorical(), outputs, targets, gradients).double()
    expected = dense(Categorical(), outputs.double(), targets, gradients.double())
    torch.testing.assert_close(found, expected, atol=0.0, rtol=3e-5)
    torch.testing.assert_close(found.sum(0), expected.sum(0), atol=0.0, rtol=5e-6)


class Coupled(HeteroscedasticGaussian):
    """Outputs that interact, as in a likelihood of one's own."""

    setting_name = "tests.Coupled"

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper=None) -> Tensor:
        turn = torch.linspace(0.1, 1.6, 16).reshape(4, 4).to(outputs) + torch.eye(4).to(outputs)
        return super().hessian_root(outputs, targets, hyper) @ turn

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper=None) -> Tensor:
        root = self.hessian_root(outputs, targets, hyper)
        return torch.einsum("rbc,rbd->bcd", root, root)


def scored(one: Case) -> Scores:
    generator = torch.Generator().manual_seed(0)
    return measure(one.model, one.weights().names, Source(one.data, batch_size=4), one.likelihood, generator=generator)


def test_outputs_that_interact_take_a_product_for_each_number() -> None:
    one = case("heteroscedastic")._replace(likelihood=Coupled())
    assert ScoreForms.of(one.likelihood, one.model(one.inputs).detach(), one.targets) is None
    found = scored(one)
    torch.testing.assert_close(found.curvature, curvature(one).diagonal(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(
        found.squared_derivatives, centred(one, jacobian(one)).square().sum(0), atol=1e-12, rtol=1e-10
    )


@pytest.mark.parametrize("waiting", [0, 50, 200])
@pytest.mark.parametrize("name", ["categorical", "gaussian", "sequence", "image"])
def test_rows_may_wait_or_not(name: str, waiting: int) -> None:
    expected = scored(case(name))
    with limits.using(chunk=4 * waiting):
        found = scored(case(name))
    torch.testing.assert_close(found.curvature, expected.curvature, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(found.squared_derivatives, expected.squared_derivatives, atol=1e-14, rtol=1e-12)


def test_a_loader_may_fill_the_same_tensor_again() -> None:
    """Rows that wait are copies: the next batch may overwrite the inputs of a layer without a bias."""
    one = case("categorical")
    one.model[0] = torch.nn.Linear(3, 4, bias=False).double()
    expected = scored(one)

    class Refilled:
        def __len__(self) -> int:
            return 5

        def __iter__(self):
            inputs, targets = torch.empty(2, 3).double(), torch.empty(2, dtype=torch.long)
            for start in range(0, 10, 2):
                inputs.copy_(one.inputs[start : start + 2])
                targets.copy_(one.targets[start : start + 2])
                yield inputs, targets

    source = Source(Refilled(), num_data=10)
    found = measure(one.model, one.weights().names, source, one.likelihood, generator=torch.Generator())
    torch.testing.assert_close(found.curvature, expected.curvature)
    torch.testing.assert_close(found.squared_derivatives, expected.squared_derivatives)


def test_directions_come_a_few_at_a_time() -> None:
    """Of an image with many positions there would be more numbers in all directions than fit into memory."""
    outputs, targets = torch.randn(2, 3, 4, 5).double(), torch.randint(3, (2, 4, 5))
    targets[0, 1] = -100
    parts = list(direction_columns(Categorical(), outputs, targets, 7))
    assert [len(part) for part in parts] == [7] * 5 + [5]  # 20 positions with two directions each
    columns = torch.cat(parts).movedim(2, -1)  # [V, B, 4, 5, 3]
    apart = torch.eye(20).reshape(4, 5, 4, 5).double()
    projection = torch.einsum("hwij,cd->hwcijd", apart, torch.eye(3).double() - 1 / 3)
    torch.testing.assert_close(torch.einsum("vhwc,vijd->hwcijd", columns[:, 1], columns[:, 1]), projection)
    observed = (targets[0] != -100).double()
    kept = torch.einsum("hwcijd,hw,ij->hwcijd", projection, observed, observed)
    torch.testing.assert_close(torch.einsum("vhwc,vijd->hwcijd", columns[:, 0], columns[:, 0]), kept)
