"""What users ran into: posteriors within others, defaults of members, and networks that are not plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.ensembles import BatchNormNoise, TestTimeAugmentation
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import MAP, SGMCMC, SWAG, BatchEnsemble, Ensemble, MCDropout, Rank1, Training

pytestmark = pytest.mark.slow

TRAINING = Training(epochs=2, batch_size=32)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5)


def mlp(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Linear(16, 3))


def fit(recipe: Any, model: nn.Module) -> Any:
    return recipe.fit(model, data(), training=TRAINING, progress=False)


CHAIN = SGMCMC(burn_in=100, thinning=10, num_samples=20)
SWAG_NORM = SWAG(lr=0.05, collect_every=1, burn_in=0.2, num_samples=8)


@pytest.mark.parametrize(
    ("recipe", "norm"),
    [(SWAG_NORM, True), (BatchNormNoise(num_samples=8), True), (CHAIN, False), (MCDropout(0.3), False)],
)
def test_changes_meet_different_draws(recipe: Any, norm: bool) -> None:
    """Changes that change nothing leave the epistemic uncertainty of the inner posterior as it is."""
    x, _ = data()
    inner = fit(recipe, mlp(norm))
    outer = fit(TestTimeAugmentation(recipe=recipe, noise=1e-9), mlp(norm))
    doubts = [float(p.predict(x, num_samples=8).epistemic.mean()) for p in (inner, outer)]
    assert doubts[0] > 0
    assert 0.3 * doubts[0] < doubts[1] < 3 * doubts[0]  # eight draws of each; where they were one it was 0


@pytest.mark.parametrize("recipe", [CHAIN, Rank1(start="fresh"), MCDropout(0.2), SWAG(collect_every=1, burn_in=0.2)])
def test_one_member_predicts_as_on_its_own(recipe: Any) -> None:
    x, _ = data()
    ensemble = fit(Ensemble(members=1, recipe=recipe), mlp())
    together, alone = ensemble.predict(x), ensemble.members[0].predict(x)
    assert len(together.samples) == len(alone.samples)
    torch.testing.assert_close(together.log_probs, alone.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", [SWAG_NORM, BatchNormNoise(num_samples=8), Ensemble(members=2, recipe=SWAG_NORM)])
def test_fewer_statistics_are_enough(recipe: Any) -> None:
    assert fit(recipe, mlp(norm=True)).predict(data()[0]).probs.shape == (128, 3)


def test_members_of_rank_one_start_near_one() -> None:
    (step,) = Ensemble(recipe=Rank1()).steps()
    assert (step.start, step.initial) == ("fresh", "normal")  # type: ignore[attr-defined]
    (step,) = Ensemble(recipe=Rank1(start="fresh")).steps()
    assert (step.start, step.initial) == ("fresh", "sign")  # type: ignore[attr-defined]
    point = fit(MAP(), mlp())
    with pytest.raises(InputError, match="each member needs its own start"):
        Ensemble(recipe=Rank1(start=point))


class Reader(nn.Module):
    """A recurrent layer, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(len(x), 3, 2))[0][:, -1])


def test_a_head_after_a_recurrent_layer_is_dropped_at() -> None:
    posterior = fit(MCDropout(0.3), Reader())
    assert posterior.rates == {"head": 0.3}
    assert float(posterior.predict(data()[0]).epistemic.mean()) > 0


class Positions(nn.Module):
    """Positions of all examples go through a norm as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.reshape(len(x), 3, 2))
        return self.b(self.norm(h.flatten(0, 1)).relu().reshape(len(x), 24))


def test_norms_of_components_need_examples() -> None:
    with pytest.raises(UnsupportedError, match="use normalization='shared'"):
        fit(Rank1(normalization="component"), Positions())


def test_additive_factors_do_not_become_others() -> None:
    start = fit(Rank1(perturbation="additive"), mlp())
    with pytest.raises(InputError, match="perturbation='additive', too"):
        fit(Rank1(start=start), mlp())
    assert isinstance(fit(Rank1(start=start, perturbation="additive"), mlp()), dubito.Posterior)


def test_frozen_biases_stay() -> None:
    model = mlp()
    for value in model[0].parameters():  # type: ignore[index, union-attr]
        value.requires_grad_(False)
    posterior = fit(BatchEnsemble(members=2, weight_decay=0.1), model)
    moved = [
        float((a - b).detach().abs().max())
        for a, b in zip(posterior.model.parameters(), model.parameters(), strict=True)
    ]
    assert moved[:2] == [0.0, 0.0]
    assert min(moved[2:]) > 0
    names = posterior.layout.bias_names
    held = posterior.mixture.bias[:, : model[0].bias.numel()]  # type: ignore[index, union-attr]
    assert names[0] == "0.bias"
    assert torch.equal(held, model[0].bias.expand_as(held))  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MCDropout("a"), "a probability above 0 and below 1, a dict of them or None, got 'a'"),
        (lambda: MCDropout(0.1, repeats=True), "`repeats` must be a whole number"),
        (lambda: MCDropout(prior_precision="a"), "`prior_precision` must be a number"),
        (lambda: SWAG(burn_in="a"), "`burn_in` must be .*, got 'a'"),
        (lambda: SWAG(collect_every=2.5), "`collect_every` must be .*, got 2.5"),
        (lambda: SWAG(num_samples=2.5), "`num_samples` must be .*, got 2.5"),
        (lambda: Ensemble(perturbation="a"), "`perturbation` must be a number"),
        (lambda: TestTimeAugmentation(noise="a"), "`noise` must be a number of at least 0"),
        (lambda: TestTimeAugmentation(recipe=Ensemble(), noise=0.1), r"Ensemble\(recipe=TestTimeAugmentation"),
        (lambda: Ensemble(recipe=MCDropout(0.1, train=False)), r"Ensemble\(start='model'\)"),
    ],
)
def test_one_sentence(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()
