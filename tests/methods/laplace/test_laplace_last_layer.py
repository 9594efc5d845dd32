"""Last layers of many outputs: the short form of their curvature is exact, and large ones stay small in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from torch import Tensor, nn

from dubito import Laplace, select
from dubito.curvature.curvature_pass import CurvaturePass, PassKind
from dubito.curvature.engine import Tape
from dubito.fitting import loop

OUTPUTS = 40
LIKELIHOODS: list[Likelihood] = [
    Categorical(ignore_index=-1), Bernoulli(), Gaussian(noise=0.5), HeteroscedasticGaussian()
]  # fmt: skip


def problem(likelihood: Likelihood, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).to(dtype)
    x = torch.randn(30, 3, dtype=dtype)
    targets = likelihood.sample(model(x).detach(), generator=torch.Generator().manual_seed(0))
    if isinstance(likelihood, Categorical):
        targets[::7] = -1
    return model, (x, targets)


SELECTIONS = {
    "layer": select.last_layer(),
    "bias": select.layers("2.bias"),
    "weight": select.layers("2.weight"),
    "some": select.mask({"2.weight": torch.arange(5 * OUTPUTS).reshape(OUTPUTS, 5) % 3 == 0}),
}


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_the_short_form_is_exact(
    structure: str, selection: str, likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = problem(likelihood)
    recipe = Laplace(structure=structure, weights=SELECTIONS[selection], prior_precision=0.5)
    pulled: list[int] = []
    pull = Tape.pull

    def counted(self: Tape, columns: Tensor, *memory: Any) -> Any:
        pulled.append(len(columns))
        return pull(self, columns, *memory)

    monkeypatch.setattr(Tape, "pull", counted)
    monkeypatch.setattr(loop, "finish", lambda posterior, *_: posterior)  # which predicts
    short = recipe.fit(model, data, likelihood=likelihood)
    assert max(pulled) <= 2 or structure == "kron"
    pulled.clear()
    monkeypatch.setattr(CurvaturePass, "_chosen", lambda *_: PassKind("ggn"))
    whole = recipe.fit(model, data, likelihood=likelihood)
    assert sum(pulled) >= OUTPUTS
    identity = torch.eye(whole.selection.num_weights, dtype=torch.float64)
    torch.testing.assert_close(short.matrix.matmul(identity), whole.matrix.matmul(identity), rtol=1e-10, atol=1e-10)


def test_a_certain_network_keeps_its_small_curvature() -> None:
    """In float32 the probability of the winner rounds to 1, but 1 − p is not 0."""
    model, (x, y) = problem(Categorical(), torch.float32)
    with torch.no_grad():
        model[2].bias[0] += 18.0
    for structure in ("diag", "kron"):
        recipe = Laplace(structure=structure, weights=select.layers("2.bias"), prior_precision=1.0)
        found = recipe.fit(model, (x, y.clamp_min(0))).matrix.diagonal()
        exact = recipe.fit(model.double(), (x, y.clamp_min(0))).matrix.diagonal()
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-9)
        model.float()


def test_hidden_layers_are_not_mistaken_for_the_last() -> None:
    """The short form is only for the layer that gives the outputs."""
    model, data = problem(Categorical(ignore_index=-1))
    both, hidden = (
        Laplace(structure="diag", weights=w).fit(model, data, likelihood=Categorical(ignore_index=-1))
        for w in (select.all(), select.layers("0"))
    )
    torch.testing.assert_close(both.matrix.diagonal()[:20], hidden.matrix.diagonal())


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_many_classes_predict(structure: str) -> None:
    """1,000 classes: the probabilities are those of the formula, with variances that never hold a Jacobian."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(16, 1000), torch.randn(64, 16), torch.randint(1000, (64,))
    posterior = Laplace(structure=structure, weights=select.last_layer(), prior_precision=5.0).fit(model, (x, y))
    prediction = posterior.predict(x[:4], centred=False)
    rows = torch.cat([x[:4], torch.ones(4, 1)], dim=1).double()
    covariance = posterior.covariance
    for c in (0, 17, 999):
        jacobian = torch.zeros(4, 17_000, dtype=torch.float64)
        jacobian[:, 16 * c : 16 * (c + 1)], jacobian[:, 16_000 + c] = rows[:, :16], 1.0
        variance = (jacobian * covariance.solve(jacobian)).sum(1)
        _, (found,) = posterior.linearized.variances(x[:4], [covariance], centred=False)
        torch.testing.assert_close(found[:, c].double(), variance, rtol=1e-4, atol=1e-5)
    assert prediction.samples is None  # too many numbers to keep
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(4))
