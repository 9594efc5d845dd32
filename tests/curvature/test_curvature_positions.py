"""Outputs with positions (pixels, tokens): exact against brute force in float64, within bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

from dubito import MAP, Laplace, select
from dubito.beliefs.likelihoods import Categorical
from dubito.core import limits
from dubito.core.once import warn_once
from dubito.curvature import output_columns
from dubito.curvature.kronecker import WideFactorWarning
from dubito.curvature.linearized import SampledWarning
from dubito.methods.laplace.sampled_variance import SampledVariance
from oracles import close

pytestmark = pytest.mark.slow


class Pixels(nn.Module):
    """Logits ``[B, 3, H, W]`` whose head looks at 3 x 3 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Tokens(nn.Module):
    """Logits ``[B, T, C]``; a token sees those before it."""

    def __init__(self, classes: int = 5, has_bias: bool = True) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(classes, 3), nn.Linear(3, classes, bias=has_bias)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids).cumsum(1)))


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "pixels":
        labels = torch.randint(3, (4, 3, 2))
        labels[0, 0, 0] = -100
        return Pixels().double(), torch.randn(4, 1, 3, 2).double(), labels
    ids = torch.randint(5, (4, 6))
    return Tokens(has_bias=kind != "no bias").double(), ids, ids.roll(-1, 1)


def jacobian(model: nn.Module, names: list[str], inputs: Tensor) -> Tensor:
    """Return ``[B, T, C, D]`` by plain autograd."""
    weights = dict(model.named_parameters())
    outputs = Categorical().canonical(model(inputs)).flatten(1, -2)
    rows = [torch.autograd.grad(entry, [weights[n] for n in names], retain_graph=True) for entry in outputs.flatten()]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).reshape(*outputs.shape, -1)


def exact_curvature(model: nn.Module, names: list[str], inputs: Tensor, labels: Tensor) -> Tensor:
    probs = Categorical().canonical(model(inputs)).flatten(1, -2).softmax(-1)
    hessian = torch.diag_embed(probs) - probs[..., :, None] * probs[..., None, :]
    hessian = hessian * (labels.flatten(1) != -100)[..., None, None]
    rows = jacobian(model, names, inputs)
    return torch.einsum("btcd,btce,btef->df", rows, hessian, rows).detach()


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Split all work into small parts."""
    with limits.using(chunk=2**9, gradients=2**12):
        yield


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
@pytest.mark.parametrize("weights", [select.last_layer(), select.all()], ids=["head", "all"])
@pytest.mark.parametrize("kind", ["pixels", "tokens", "no bias"])
def test_curvature_and_variances_are_exact(kind: str, weights: select.SelectionRule, structure: str) -> None:
    model, inputs, labels = problem(kind)
    recipe = Laplace(structure=structure, weights=weights, prior_precision=0.7, rank=60)
    posterior = recipe.fit(model, (inputs, labels), progress=False)
    names, size = posterior.selection.names, posterior.selection.num_weights
    curvature = exact_curvature(model, names, inputs, labels)
    eye = torch.eye(size, dtype=torch.float64)
    if structure in ("full", "low-rank"):
        close(posterior.matrix.matmul(eye), curvature, 1e-9)
    if structure == "diag":
        close(posterior.matrix.diagonal(), curvature.diagonal(), 1e-12)
    covariance = posterior.covariance.solve(eye)
    rows = jacobian(model, names, inputs)
    rows = rows - rows.mean(-2, keepdim=True)
    wanted = torch.einsum("btcd,de,btce->btc", rows, covariance, rows).detach()
    outputs, (variance,) = posterior.linearized.variances(inputs, [posterior.covariance], centred=True)
    close(variance.flatten(1, -2), wanted, 1e-9)
    where = torch.tensor([[1, 0], [2, 5], [3, 3], [4, 1]])
    picked, (some,) = posterior.linearized.variances_at(inputs, [posterior.covariance], where, centred=True)
    close(some.reshape(4, 2, -1), wanted[torch.arange(4)[:, None], where], 1e-9)
    flat = Categorical().canonical(outputs).flatten(1, -2)
    close(picked.reshape(4, 2, -1), flat[torch.arange(4)[:, None], where], 1e-12)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_kronecker_factors_of_a_head_are_those_of_its_positions(structure: str) -> None:
    model, inputs, labels = problem("tokens")
    posterior = Laplace(weights=select.last_layer(), prior_precision=1.0).fit(model, (inputs, labels), progress=False)
    features = torch.tanh(model.tokens(inputs).cumsum(1)).flatten(0, 1)
    probs = model(inputs).flatten(0, 1).softmax(-1)
    left = torch.diag(probs.sum(0)) - probs.mT @ probs
    close(posterior.sums["head.weight"]["left"][0], left.detach(), 1e-12)
    close(posterior.sums["head.weight"]["right"][0], (features.mT @ features).detach(), 1e-12)
    assert float(posterior.sums["head.weight"]["count"]) == 24


def test_sampled_curvature_of_many_positions_has_the_right_mean() -> None:
    model, inputs, labels = problem("pixels")
    rows, outputs = jacobian(model, ["head.weight"], inputs), model(inputs).detach()
    options = {"num_samples": 4000, "most": 4000, "generator": torch.Generator().manual_seed(0)}
    (columns,) = output_columns.columns("fisher-mc", Categorical(), outputs, labels, **options)
    flat = Categorical().canonical(columns.flatten(0, 1)).reshape(4000, 4, 6, 3)
    pulled = torch.einsum("vbtc,btcd->vbd", flat, rows)
    total = torch.einsum("vbd,vbe->de", pulled, pulled)
    wanted = exact_curvature(model, ["head.weight"], inputs, labels)
    assert float((total - wanted).norm() / wanted.norm()) < 0.1


def test_many_outputs_are_sampled_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, labels = problem("pixels")
    warn_once.forget()
    for module in ("curvature_pass", "linearized"):
        monkeypatch.setattr(f"dubito.curvature.{module}.MOST_EXACT", 10)
    with pytest.warns(SampledWarning) as given:
        posterior = Laplace(prior_precision=50.0).fit(model, (inputs, labels), progress=False)
    said = " ".join(str(each.message) for each in given)
    assert "estimated from sampled targets" in said
    assert "32 weight samples" in said
    exact, sampled = posterior.predict(inputs, exact=True), posterior.predict(inputs)
    _, (variance,) = posterior.linearized.variances(inputs, [posterior.covariance], centred=True)
    monkeypatch.setattr("dubito.methods.laplace.sampled_variance.DRAWS", 4000)
    _, estimated = SampledVariance(posterior, torch.Generator())(inputs, True)
    assert float((estimated / variance - 1).abs().max()) < 0.2  # 1 / √2000 is 0.02
    assert float((sampled.probs - exact.probs).abs().max()) < 0.05


@pytest.mark.filterwarnings("ignore::dubito.curvature.linearized.SampledWarning")
def test_many_weights_and_outputs_are_tuned_on_a_coarse_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds about the same prior precision as the fine grid."""
    data = problem("pixels")
    for module in ("curvature.linearized", "methods.laplace.tuning"):
        monkeypatch.setattr(f"dubito.{module}.MOST_EXACT", 10)
    fine = Laplace(curvature="ggn").fit(data[0], data[1:], progress=False)
    with limits.using(kept_weights=4):
        coarse = Laplace(curvature="ggn").fit(data[0], data[1:], progress=False)
    found = [float(posterior.prior_precision) for posterior in (fine, coarse)]
    assert found[0] != found[1]
    assert abs(math.log(found[1] / found[0])) < math.log(10) / 4


@pytest.mark.parametrize("tuned", [False, True], ids=["given", "tuned"])
def test_a_wide_head_keeps_a_diagonal(tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dubito.curvature.linearized.WIDE", 4)
    if tuned:
        monkeypatch.setattr("dubito.methods.laplace.tuning.MOST_EXACT", 10)
    model, inputs, labels = problem("tokens")
    warn_once.forget()
    recipe = Laplace(weights=select.last_layer(), prior_precision="training" if tuned else 1.0)
    with limits.using(kronecker_factor=8 * 4**2), pytest.warns(WideFactorWarning, match="over 5 numbers"):
        posterior = recipe.fit(model, (inputs, labels), progress=False)
    probs = model(inputs).flatten(0, 1).softmax(-1).detach()
    close(posterior.sums["head.weight"]["left"][0], (probs * (1 - probs)).sum(0), 1e-12)
    rows = jacobian(model, posterior.selection.names, inputs)
    rows = rows - rows.mean(-2, keepdim=True)
    covariance = posterior.covariance.solve(torch.eye(posterior.selection.num_weights, dtype=torch.float64))
    wanted = torch.einsum("btcd,de,btce->btc", rows, covariance, rows).detach()
    _, (variance,) = posterior.linearized.variances(inputs, [posterior.covariance], centred=True)
    close(variance, wanted, 1e-10)
    close(posterior.precision_matmul(covariance), torch.eye(len(covariance), dtype=torch.float64), 1e-9)


def test_top_k_keeps_the_most_probable_classes() -> None:
    model, inputs, labels = problem("tokens")
    posterior = MAP(train=False).fit(model, (inputs, labels), progress=False)
    whole = posterior.predict(inputs)
    with limits.using(outputs=2**8):  # a batch is split
        top = posterior.predict(inputs, top_k=2)
    close(top.probs, whole.probs.topk(2).values, 1e-12)
    assert torch.equal(top.mode, whole.mode)
    close(top.entropy, whole.entropy, 1e-12)
    close(top.log_prob(whole.mode), whole.log_prob(whole.mode), 1e-12)
    assert len(top[:2]) == 2
    with pytest.raises(UnsupportedError, match="predict without top_k"):
        top.log_prob(whole.log_probs.argmin(-1))
    data = (torch.ones(3, 2), torch.ones(3, 1))
    numbers = MAP(train=False).fit(nn.Linear(2, 1), data, likelihood="gaussian", progress=False)
    with pytest.raises(InputError, match="leave it out"):
        numbers.predict(data[0], top_k=1)
