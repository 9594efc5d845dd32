"""Networks, batches and settings that are valid and once ended in an error of torch: now right, by autograd."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import Training, likelihoods, select
from dubito.core.batches import Source
from dubito.fitting.optimizers import Optimizer
from fitting.valid_networks import NETWORKS, LogitScale, mlp, normalized

pytestmark = pytest.mark.slow

SHORT = Training(epochs=4, batch_size=4)
TRAINED = {
    "MAP": dubito.MAP(),
    "Variational": dubito.Variational(),
    "Rank1": dubito.Rank1(components=2),
    "BatchEnsemble": dubito.BatchEnsemble(members=2),
    "SWAG": dubito.SWAG(),
    "MCDropout": dubito.MCDropout(),
    "Snapshot": dubito.Snapshot(cycles=2),
    "Ensemble": dubito.Ensemble(2, recipe=dubito.MAP(start="model")),
}


def data(size: int = 12, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, 5, generator=generator), torch.randn(size, outputs, generator=generator)


def network(build: Callable[[int], nn.Module], outputs: int = 1) -> nn.Module:
    torch.manual_seed(5)
    return build(outputs)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``[N, D]`` of a network with one output, one example at a time."""
    weights = list(model.parameters())
    rows = []
    for each in x:
        grads = torch.autograd.grad(model(each[None]).sum(), weights, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("build", [mlp, LogitScale])
def test_clipping_works_with_a_learned_noise_and_parameters_without_axes(
    name: str, build: Callable[[int], nn.Module]
) -> None:
    training = SHORT.replace(clip=0.5)
    found = TRAINED[name].fit(network(build), data(), likelihood="gaussian", training=training, progress=False)
    assert found.predict(data()[0], num_samples=2).mean.isfinite().all()


def test_clipping_scales_every_gradient_by_the_same_factor_in_its_own_precision() -> None:
    grads = {"matrix": torch.full((2, 2), 3.0), "number": torch.tensor(8.0)}
    clipped = Optimizer(Training(clip=1.0), list(grads))._clipped(grads)
    norm = (4 * 9 + 64) ** 0.5
    for each, before in zip(clipped.values(), grads.values(), strict=True):
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, before / norm)


# ---------------------------------------------------------------------- activations in place


@pytest.mark.parametrize("name", TRAINED)
def test_an_activation_in_place_gives_the_bits_of_one_that_is_not(name: str) -> None:
    x, y = data()
    found = [
        TRAINED[name].fit(
            network(lambda outputs, inplace=inplace: mlp(outputs, inplace)), (x, y), likelihood="gaussian",
            training=SHORT, progress=False,
        )
        for inplace in (False, True)
    ]  # fmt: skip
    assert found[0].digest() == found[1].digest()
    assert torch.equal(found[0].predict(x).mean, found[1].predict(x).mean)


# ---------------------------------------------------------------------- layers without a rule, 0-dim parameters


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag", "low-rank", "kron"])
@pytest.mark.parametrize("name", NETWORKS)
def test_laplace_is_the_curvature_by_autograd(name: str, structure: str, learned: bool) -> None:
    model, (x, y) = network(NETWORKS[name]).double(), (each.double() for each in data())
    rows = jacobian(model, x)
    recipe = dubito.Laplace(structure=structure, prior_precision=2.0, rank=rows.shape[1])
    likelihood = likelihoods.Gaussian() if learned else likelihoods.Gaussian(noise=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no rule fits is said, and tested elsewhere
        found = recipe.fit(model, (x, y), likelihood=likelihood, progress=False)
    truth = rows.mT @ rows / found.noise**2 + 2.0 * torch.eye(rows.shape[1], dtype=torch.float64)
    if structure in ("full", "low-rank"):
        torch.testing.assert_close(found.precision_matmul(torch.eye(len(truth), dtype=torch.float64)), truth)
    elif structure == "diag":
        diagonal = torch.cat([each.flatten() for each in found.precision_diagonal().values()])
        torch.testing.assert_close(diagonal, truth.diagonal())
    if name == "logit scale":  # of one number all structures are exact
        own = list(dict(model.named_parameters())).index("scale")
        before = sum(p.numel() for p in list(model.parameters())[:own])
        torch.testing.assert_close(found.precision_diagonal()["scale"], truth[before, before])
    assert found.predict(x).variance.isfinite().all()
    assert found.sample(3)[next(iter(found.mean()))].isfinite().all()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_subnetwork_is_found_in_layers_without_a_rule(name: str, likelihood: str) -> None:
    x, y = data()
    y, outputs = (y, 1) if likelihood == "gaussian" else ((y[:, 0] > 0).long(), 2)
    recipe = dubito.Laplace(structure="full", weights=select.subnetwork(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = recipe.fit(network(NETWORKS[name], outputs), (x, y), likelihood=likelihood, progress=False)
    assert found.selection.num_weights == 6


# ---------------------------------------------------------------------- subspaces


def test_swag_runs_in_a_subspace() -> None:
    x, y = data()
    rule = select.subspace(2)
    found = dubito.SWAG(weights=rule).fit(network(mlp), (x, y), likelihood="gaussian", training=SHORT, progress=False)
    basis = found.selection.basis.double()
    for name, weights in found.sample(4).items():
        assert weights.shape == (4, *found.mean()[name].shape)
    moved = found.selection.weights.ravel(found.sample(4)).double() - found.selection.offset.double()
    off = moved - moved @ torch.linalg.pinv(basis).mT @ basis.mT
    assert float(off.norm()) < 1e-5 * max(float(moved.norm()), 1.0)


# ---------------------------------------------------------------------- a batch of one row under batch normalization


def fit_normalized(given: object, **settings: object) -> dubito.Posterior:
    training = Training(epochs=2, batch_size=4, shuffle=False, **settings)
    with pytest.warns(UserWarning, match="one row is joined") as said:
        found = dubito.MAP().fit(
            network(normalized), given, likelihood=likelihoods.Gaussian(noise=1.0), training=training, progress=False
        )
    assert sum("one row" in str(each.message) for each in said) == 1
    return found


def test_a_last_batch_of_one_row_is_joined_to_the_one_before() -> None:
    x, y = data(9)
    by_hand = [(x[:4], y[:4]), (x[4:], y[4:])]
    likelihood, training = likelihoods.Gaussian(noise=1.0), Training(epochs=2)
    truth = dubito.MAP().fit(network(normalized), by_hand, likelihood=likelihood, training=training, progress=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    for given in ((x, y), loader, batches):
        assert fit_normalized(given).digest() == truth.digest()


def test_a_first_batch_of_one_row_is_joined_to_the_next() -> None:
    x, y = data(9)
    by_hand = [(x[:5], y[:5]), (x[5:], y[5:])]
    likelihood, training = likelihoods.Gaussian(noise=1.0), Training(epochs=2)
    truth = dubito.MAP().fit(network(normalized), by_hand, likelihood=likelihood, training=training, progress=False)
    found = fit_normalized([(x[:1], y[:1]), (x[1:5], y[1:5]), (x[5:], y[5:])])
    for name, value in found.mean().items():  # the schedule counts a batch more
        torch.testing.assert_close(value, truth.mean()[name], rtol=0.05, atol=2e-3)


def test_rows_are_joined_only_where_the_network_needs_it() -> None:
    x, y = data(9)
    small = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 1))
    for model in (network(mlp), small):  # four positions are enough for the statistics; a warning is an error here
        dubito.MAP().fit(model, (x, y), likelihood="gaussian", training=SHORT, progress=False)


def test_joined_batches_are_counted_as_one() -> None:
    source = Source(data(9), batch_size=4)
    source.join_single_rows()
    with pytest.warns(UserWarning, match="one row is joined"):
        sizes = [batch.size for batch in source.epoch()]
    assert sizes == [4, 5]
    assert source.num_batches == 2


class Interrupted(Dataset[tuple[Tensor, Tensor]]):
    """Nine rows, and Ctrl-C when the given one is read for the second time."""

    def __init__(self, row: int | None) -> None:
        self.row, self.reads = row, 0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += index == self.row
        if index == self.row and self.reads == 3:  # the first look at the data is one
            self.row = None
            raise KeyboardInterrupt
        x, y = data(9)
        return x[index], y[index]


@pytest.mark.parametrize("row", [0, 5, 8])
def test_a_run_with_joined_batches_resumes_exactly(row: int, tmp_path: Path) -> None:
    whole, loader = fit_normalized(DataLoader(Interrupted(None), batch_size=4)), Interrupted(row)
    given, checkpoint = DataLoader(loader, batch_size=4), str(tmp_path / "run")
    if row:
        loader.reads = 1  # not in the first batch, so not looked at
    with pytest.raises(KeyboardInterrupt):
        fit_quietly(given, checkpoint)
    assert loader.row is None
    assert fit_normalized(given, checkpoint=checkpoint).digest() == whole.digest()


def fit_quietly(given: object, checkpoint: str) -> None:
    training = Training(epochs=2, batch_size=4, shuffle=False, checkpoint=checkpoint)
    likelihood = likelihoods.Gaussian(noise=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dubito.MAP().fit(network(normalized), given, likelihood=likelihood, training=training, progress=False)


def test_the_model_is_never_touched_by_the_trial_of_one_row() -> None:
    model = network(normalized)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="one row is joined"):
        dubito.MAP().fit(model, data(9), likelihood="gaussian", training=SHORT, progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
