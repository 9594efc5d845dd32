"""The same numbers as laplace-torch on the same networks, where it is right."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.likelihoods import Gaussian
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import Laplace, select
from extras import needs

Peer, CurvlinopsEF = needs("laplace").Laplace, needs("laplace.curvature").CurvlinopsEF

# the warnings are those of the peer
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("in_float64")]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def network(name: str, outputs: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)), torch.randn(40, 5)
    layers = (nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(18, outputs)), torch.randn(40, 1, 6, 6)


def targets(task: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, (40,)) if task == "classification" else torch.randn(40, 3)


def both(name: str, task: str, structure: str, subset: str = "all", sigma: float = 0.7, **settings):
    """The peer's posterior, ours, and the inputs."""
    (model, x), y = network(name), targets(task)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    options = {"sigma_noise": sigma} if task == "regression" else {}
    options |= {"prior_precision": settings.get("prior_precision", 2.0)}
    options |= {key: settings[key] for key in ("temperature", "prior_mean") if key in settings}
    theirs = Peer(model, task, subset_of_weights=subset, hessian_structure=structure, **options)
    theirs.fit(loader)
    recipe = Laplace(
        structure=structure,
        weights=select.all() if subset == "all" else select.last_layer(),
        **{"prior_precision": 2.0, **settings},
    )
    likelihood = "categorical" if task == "classification" else Gaussian(noise=sigma)
    return theirs, recipe.fit(model, loader, likelihood=likelihood), x


PAIRS = [(subset, structure) for subset in ("all", "last_layer") for structure in ("full", "kron", "diag")]


@pytest.mark.parametrize(("subset", "structure"), PAIRS)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.3, "prior_mean": 0.2}])
def test_classification(name: str, subset: str, structure: str, settings: dict) -> None:
    theirs, ours, x = both(name, "classification", structure, subset, **settings)
    torch.testing.assert_close(ours.log_evidence(), theirs.log_marginal_likelihood().detach(), **CLOSE)
    _, covariance = theirs._glm_predictive_distribution(x)
    torch.testing.assert_close(ours.functional(x)[1], covariance.detach(), **CLOSE)
    for link in ("probit", "bridge", "bridge-norm"):
        expected = theirs(x, pred_type="glm", link_approx=link.replace("-", "_")).detach()
        torch.testing.assert_close(ours.predict(x, link=link, centred=False).probs, expected, **CLOSE)


@pytest.mark.parametrize(("subset", "structure"), PAIRS)
def test_regression(subset: str, structure: str) -> None:
    theirs, ours, x = both("mlp", "regression", structure, subset)
    torch.testing.assert_close(ours.log_evidence(), theirs.log_marginal_likelihood().detach(), **CLOSE)
    mean, covariance = theirs(x, pred_type="glm")
    prediction = ours.predict(x)
    torch.testing.assert_close(prediction.mean, mean.detach(), **CLOSE)
    torch.testing.assert_close(prediction.epistemic, covariance.detach().diagonal(dim1=1, dim2=2), **CLOSE)
    torch.testing.assert_close(prediction.aleatoric.flatten()[0].item(), 0.7**2)


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_subnetworks_of_the_same_indices(name: str, structure: str) -> None:
    (model, x), y = network(name), targets("classification")
    size = sum(p.numel() for p in model.parameters())
    indices = torch.randperm(size, generator=torch.Generator().manual_seed(3))[:20].sort().values
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    theirs = Peer(
        model, "classification", subset_of_weights="subnetwork", hessian_structure=structure,
        subnetwork_indices=indices, prior_precision=2.0,
    )  # fmt: skip
    theirs.fit(loader)
    flat, masks = torch.zeros(size, dtype=torch.bool).index_fill(0, indices, True), {}
    for key, value in model.named_parameters():
        masks[key], flat = flat[: value.numel()].reshape(value.shape), flat[value.numel() :]
    ours = Laplace(structure=structure, weights=select.mask(masks), prior_precision=2.0).fit(model, loader)
    _, covariance = theirs._glm_predictive_distribution(x)
    torch.testing.assert_close(ours.functional(x)[1], covariance.detach(), **CLOSE)
    expected = theirs(x, pred_type="glm", link_approx="probit").detach()
    torch.testing.assert_close(ours.predict(x, centred=False).probs, expected, **CLOSE)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_layerwise_prior(structure: str) -> None:
    precision = torch.tensor([1.0, 2.0, 3.0, 4.0])
    theirs, ours, x = both("mlp", "classification", structure, prior_precision=1.0)
    theirs.prior_precision = precision
    named = dict(zip(ours.selection.names, precision.tolist(), strict=True))
    recipe = Laplace(structure=structure, prior_precision=named)
    ours = recipe.fit(network("mlp")[0], (x, targets("classification")))
    torch.testing.assert_close(ours.log_evidence(), theirs.log_marginal_likelihood().detach(), **CLOSE)
    expected = theirs(x, pred_type="glm", link_approx="probit").detach()
    torch.testing.assert_close(ours.predict(x, centred=False).probs, expected, **CLOSE)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_evidence_tuning_is_no_worse(structure: str) -> None:
    """Their hundred steps of Adam approach the maximum that ours finds."""
    theirs, ours, _ = both("mlp", "classification", structure, prior_precision=1.0)
    theirs.optimize_prior_precision(method="marglik", n_steps=300, lr=0.1)
    tuned = Laplace(structure=structure, prior_precision="evidence").fit(
        network("mlp")[0], (network("mlp")[1], targets("classification"))
    )
    best = theirs.log_marginal_likelihood().item()
    assert tuned.log_evidence().item() >= best - 1e-9
    assert tuned.log_evidence().item() == pytest.approx(best, abs=1e-3)
    assert math.isclose(tuned.prior_precision.item(), theirs.prior_precision.item(), rel_tol=0.05)
    assert ours.log_evidence().item() <= tuned.log_evidence().item()


def test_empirical_fisher() -> None:
    (model, x), y = network("mlp"), targets("classification")
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    theirs = Peer(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=2.0,
        backend=CurvlinopsEF,
    )
    theirs.fit(loader)
    ours = Laplace(structure="full", curvature="fisher-empirical", prior_precision=2.0).fit(model, loader)
    torch.testing.assert_close(ours.log_evidence(), theirs.log_marginal_likelihood().detach(), **CLOSE)
