"""The same numbers as laplace-torch's SubnetLaplace for the same weights."""

from __future__ import annotations

import pytest
import torch
from dubito.likelihoods import Categorical, Gaussian
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import Laplace, select
from extras import needs

Peer, DiagLaplace = needs("laplace").Laplace, needs("laplace").DiagLaplace
LargestVarianceDiagLaplaceSubnetMask = needs("laplace.utils").LargestVarianceDiagLaplaceSubnetMask

# the warnings are those of the peer
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("in_float64")]
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
PRIOR, SIGMA, SIZE = 2.0, 0.7, 14


def problem(task: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(40, 5)
    return model, x, torch.randint(3, (40,)) if task == "classification" else torch.randn(40, 3)


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_posterior_evidence_and_predictions(task: str, structure: str) -> None:
    model, x, y = problem(task)
    likelihood = Categorical() if task == "classification" else Gaussian(noise=SIGMA)
    recipe = Laplace(structure=structure, weights=select.subnetwork(SIZE), prior_precision=PRIOR)
    ours = recipe.fit(model, (x, y), likelihood=likelihood)
    chosen = torch.cat([mask.flatten() for mask in ours.selection.masks().values()]).nonzero().squeeze(1)
    options = {"sigma_noise": SIGMA} if task == "regression" else {}
    theirs = Peer(
        model, task, subset_of_weights="subnetwork", hessian_structure=structure,
        subnetwork_indices=chosen, prior_precision=PRIOR, **options,
    )  # fmt: skip
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    precision = theirs.posterior_precision if structure == "full" else torch.diag(theirs.posterior_precision)
    torch.testing.assert_close(ours.precision_matmul(torch.eye(SIZE)), precision, **CLOSE)
    torch.testing.assert_close(ours.log_evidence(), theirs.log_marginal_likelihood().detach().squeeze(), **CLOSE)
    mean, covariance = theirs._glm_predictive_distribution(2 * x)
    found = ours.functional(2 * x)
    torch.testing.assert_close(found[0], mean.detach(), **CLOSE)
    torch.testing.assert_close(found[1], covariance.detach(), **CLOSE)
    if task == "classification":  # the peer does not centre the logits
        probs = theirs(2 * x, link_approx="probit").detach()
        torch.testing.assert_close(ours.predict(2 * x, centred=False).probs, probs, **CLOSE)


def test_the_largest_variances() -> None:
    model, x, y = problem("classification")
    diagonal = DiagLaplace(model, "classification", prior_precision=PRIOR)
    rule = LargestVarianceDiagLaplaceSubnetMask(model, SIZE, diagonal)
    theirs = rule.select(DataLoader(TensorDataset(x, y), batch_size=16))
    ours = select.largest_variance(SIZE).resolve(model, (x, y), prior_precision=PRIOR)
    masks = torch.cat([mask.flatten() for mask in ours.masks().values()])
    assert torch.equal(masks.nonzero().squeeze(1), theirs.sort().values)
