"""`dubito.compress` from every posterior: what it changes, what it leaves, and what it refuses."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import POSTERIORS, fit, point, table
from dubito.compression import Compression, GradualMagnitude, Plan, compress
from dubito.errors import InputError, MissingDataError, UnsupportedError
from dubito.likelihoods import Gaussian
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, Laplace, Training, Variational, priors, rules, select
from dubito.methods.map.posterior import PointPosterior
from dubito.uses.compression.search import score_of
from dubito.uses.compression.weight_statistics import default_rule, prunable
from extras import needs

pytestmark = pytest.mark.slow

HELD_OUT = table(1)


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("structure", ["weights", "units"])
def test_every_posterior_can_be_compressed(kind: str, structure: Any) -> None:
    posterior = fit(kind)
    before = posterior.digest()
    made = compress(posterior, rules.SignalToNoise(target=0.3, scope="layer"), structure=structure, data=HELD_OUT)
    assert posterior.digest() == before
    assert type(made.model) is nn.Sequential
    assert not made.model.training
    assert made.plan.sparsity > 0.25
    whole, left = (sum(int((p != 0).sum()) for p in m.parameters()) for m in (posterior.model, made.model))
    assert left < whole
    assert score_of(posterior, HELD_OUT)(made.model) > 0.5


@pytest.mark.parametrize("kind", POSTERIORS)
def test_the_default_rule_is_the_posteriors_own(kind: str) -> None:
    expected = rules.LogAlpha(3) if kind in ("log-uniform", "ard") else rules.ModelReduction()
    assert default_rule(fit(kind)) == expected
    assert compress(fit(kind), allow_empty=True).rule == expected


def test_biases_and_gains_stay() -> None:
    """A bias shifts a whole unit, a gain scales one: neither is pruned as if it were one weight among many."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    assert prunable(model) == ["0.weight", "3.weight"]
    posterior = Laplace(structure="diag", prior_precision=1.0).fit(
        model, (table()[0][:, :4], table()[1].clamp_max(1)), progress=False
    )
    made = compress(posterior, rules.SignalToNoise(target=0.9))
    kept = dict(made.model.named_parameters())
    for name, value in posterior.model.named_parameters():
        if value.ndim == 1:
            assert torch.equal(kept[name], value)


def test_model_reduction_under_an_improper_prior() -> None:
    with pytest.raises(UnsupportedError, match="proper prior"):
        compress(fit("log-uniform"), rules.ModelReduction())


def test_a_posterior_without_marginals() -> None:
    training = Training(epochs=1, batch_size=60)
    many = dubito.Ensemble(2).fit(fit("point").model, table(), training=training, progress=False)
    with pytest.raises(UnsupportedError, match="compress one of its members, or distill it first"):
        compress(many, rules.Magnitude(0.5))


def test_samplers_around_one_mode() -> None:
    """What is pruned is the mean of the draws, not the network that a sampler happened to end at."""
    training = Training(epochs=4, lr=1e-2, batch_size=60)
    for recipe in (dubito.SWAG(), dubito.SGMCMC("sghmc", burn_in=50, thinning=5, num_samples=20)):
        posterior = recipe.fit(fit("point").model, table(), training=training, progress=False)
        made = compress(posterior, rules.SignalToNoise(target=0.3))
        mean, _ = posterior.marginals()
        for name, value in made.model.named_parameters():
            assert torch.equal(value, mean[name] * made.plan.keep.get(name, torch.ones(())))


def test_a_point_needs_a_rule_that_asks_for_no_spread() -> None:
    with pytest.raises(UnsupportedError, match="needs a posterior with variances above 0"):
        compress(fit("point"))
    assert compress(fit("point"), rules.Magnitude(0.5)).plan.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_subnetwork_posterior_loses_random_weights_only() -> None:
    posterior = Laplace(structure="diag", weights=select.layers("0"), prior_precision=1.0).fit(
        fit("point").model, table(), progress=False
    )
    made = compress(posterior, rules.SignalToNoise(target=0.5))
    assert made.plan.layer_sparsity() == {"0.weight": 0.5, "2.weight": 0.0, "4.weight": 0.0}


def test_not_finite_weights_are_refused() -> None:
    broken = copy.deepcopy(fit("point"))
    broken.model[0].weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"'0.weight' holds NaN"):
        compress(broken, rules.Magnitude(0.5))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"structure": "rows"}, InputError, "'weights', 'units' or 'heads'"),
        ({"rule": "magnitude"}, InputError, "one of dubito.rules"),
        ({"structure": "units"}, InputError, "needs one batch of inputs"),
        ({"finetune": Training(epochs=1)}, InputError, "`finetune` must be training data"),
        ({"finetune": table(), "teacher": nn.Linear(3, 2)}, InputError, "`teacher` must be a posterior"),
        ({"teacher": fit("point")}, InputError, "give its inputs as finetune="),
        ({"finetune": table(), "temperature": 2.0}, InputError, "give teacher= too"),
        ({"finetune": table(), "teacher": fit("point"), "temperature": 0.0}, InputError, "temperature"),
        ({"rule": rules.Magnitude(max_drop=0.1)}, MissingDataError, "give `data=`"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compress(fit("diag"), **options)


# ---------------------------------------------------------------------- how much goes


def test_a_budget_holds_on_the_data_it_was_given() -> None:
    posterior = fit("diag")
    score = score_of(posterior, HELD_OUT)
    made = compress(posterior, rules.SignalToNoise(max_drop=0.05), data=HELD_OUT)
    assert made.rule.target > 0.2
    assert score(made.model) >= score(posterior.model) - 0.05
    less = compress(posterior, rules.SignalToNoise(max_drop=0.0), data=HELD_OUT)
    assert less.rule.target <= made.rule.target


def test_a_score_is_that_of_all_data() -> None:
    """Not of the last batch: one loader with a last batch of a single row gives the accuracy of all rows."""
    x, y = HELD_OUT
    posterior = fit("diag")
    expected = float((posterior.model(x[:101]).argmax(1) == y[:101]).double().mean())
    loader = DataLoader(TensorDataset(x[:101], y[:101]), batch_size=20)
    assert score_of(posterior, loader)(posterior.model) == pytest.approx(expected)


def test_the_score_of_a_regression_is_minus_the_rmse() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = PointPosterior(model, Gaussian(0.1), MAP(), 10)
    x, y = table()[0], torch.randn(120, 1)
    expected = -float((model(x) - y).square().mean().sqrt().detach())
    assert score_of(posterior, (x, y))(model) == pytest.approx(expected, rel=1e-5)
    report = compress(posterior, rules.Magnitude(0.5), data=(x, y)).report(seconds=0.001)
    assert set(report.scores["after"]) >= {"rmse", "nll"}
    assert report.code_length == {}


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_a_sweep(structure: Any, tmp_path: Path) -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.3, scope="layer"), structure=structure, data=HELD_OUT)
    swept = made.sweep(targets=(0.9, 0.0, 0.5))
    assert swept.sparsity == tuple(sorted(swept.sparsity))
    assert swept.sparsity[0] == 0.0
    assert swept.score[0] == score_of(fit("diag"), HELD_OUT)(fit("diag").model)
    swept.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert "removed" in str(swept)
    with pytest.raises(MissingDataError, match="needs held-out data"):
        compress(fit("diag"), rules.SignalToNoise(target=0.3)).sweep()


def test_random_is_worse_than_signal_to_noise() -> None:
    scores = {}
    for rule in (rules.SignalToNoise(target=0.5), rules.Random(0.5)):
        scores[type(rule)] = compress(fit("diag"), rule, data=HELD_OUT).sweep(targets=(0.5,)).score[0]
    assert scores[rules.SignalToNoise] > scores[rules.Random] + 0.1


# ---------------------------------------------------------------------- optimal brain surgeon


def test_the_update_of_optimal_brain_surgeon() -> None:
    """For one removed weight: w − w_i / Σ_ii · Σ e_i; the removed weight itself becomes zero."""
    posterior = fit("full")
    names = prunable(posterior.model)
    keep = {name: torch.ones_like(dict(posterior.model.named_parameters())[name], dtype=torch.bool) for name in names}
    keep["2.weight"][1, 3] = False
    mean = posterior.mean()
    flat = posterior.selection.ravel(mean).double()
    i = int(
        (~posterior.selection.ravel({n: keep.get(n, torch.ones_like(v).bool()) for n, v in mean.items()})).nonzero()
    )
    unit = torch.zeros_like(flat)
    unit[i] = 1.0
    column = posterior.covariance.solve(unit)
    expected = flat - flat[i] / column[i] * column
    found = posterior.selection.ravel(posterior.conditional_mean(keep)).double()
    assert (found - expected).abs().max() < 1e-5
    assert found[i] == 0.0


def test_updated_weights_have_the_smallest_loss_of_the_quadratic() -> None:
    made = [compress(fit("kron"), rules.PosteriorDamage(0.5, kind="obs", update=u)) for u in (False, True)]
    posterior = fit("kron")
    losses = [-posterior.log_prob({n: p.detach() for n, p in m.model.named_parameters()}) for m in made]
    assert losses[1] < losses[0]
    assert all(torch.equal(made[0].plan.keep[n], made[1].plan.keep[n]) for n in made[0].plan.keep)


def test_model_reduction_moves_what_stays_to_its_conditional_mean() -> None:
    made = compress(fit("kron"), rules.ModelReduction(target=0.5))
    plain = compress(fit("kron"), rules.SignalToNoise(target=0.5)).model
    expected = fit("kron").conditional_mean(made.plan.keep)
    for name, value in made.model.named_parameters():
        assert torch.equal(value, expected[name] * made.plan.keep.get(name, torch.ones(())))
    assert not all(torch.equal(a, b) for a, b in zip(made.model.parameters(), plain.parameters(), strict=True))


def test_damage_uses_the_precision_of_the_structure() -> None:
    posterior = fit("full")
    size = posterior.selection.num_weights
    whole = posterior.precision_matmul(torch.eye(size, dtype=torch.float64))
    found = posterior.precision_diagonal()
    assert torch.allclose(posterior.selection.ravel(found).double(), whole.diagonal(), rtol=1e-8)


# ---------------------------------------------------------------------- training under masks


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_fine_tuning_keeps_zeros_and_helps(structure: Any) -> None:
    rule = rules.SignalToNoise(target=0.6, scope="layer")
    plain = compress(fit("diag"), rule, structure=structure, data=HELD_OUT)
    tuned = compress(
        fit("diag"), rule, structure=structure, data=HELD_OUT, finetune=table(),
        training=Training(epochs=15, lr=1e-2, batch_size=30),
    )  # fmt: skip
    if structure == "weights":
        for name, mask in tuned.plan.keep.items():
            assert not dict(tuned.model.named_parameters())[name][~mask].any()
    score = score_of(fit("diag"), table())
    assert score(tuned.model) > score(plain.model)


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_teacher_is_distilled_into_what_is_left(as_loader: bool) -> None:
    """Labels that are all wrong do no harm: the answers of the teacher are what is learned, and zeros stay zero."""
    inputs, labels = table()
    wrong = (inputs, (labels + 1) % 3)
    data = DataLoader(TensorDataset(*wrong), batch_size=30) if as_loader else wrong
    rule = rules.SignalToNoise(target=0.6, scope="layer")
    training = Training(epochs=15, lr=1e-2, batch_size=30)
    how: dict[str, Any] = {"finetune": data, "training": training}
    taught = compress(fit("diag"), rule, teacher=fit("point"), temperature=2.0, **how)
    for name, mask in taught.plan.keep.items():
        assert not dict(taught.model.named_parameters())[name][~mask].any()
    before = compress(fit("diag"), rule).model
    away = [(m(inputs).softmax(1) - fit("point").predict(inputs).probs).abs().mean() for m in (before, taught.model)]
    assert away[1] < 0.5 * away[0]
    score = score_of(fit("diag"), table())
    assert score(taught.model) > 0.7 > 0.6 > score(compress(fit("diag"), rule, **how).model)


def test_masks_divert_no_gradient() -> None:
    """What is fine-tuned is what comes back: one step moves every weight that stays, and none that went."""
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    tuned = compress(
        fit("diag"), rules.SignalToNoise(target=0.5), finetune=table(),
        training=Training(epochs=1, lr=1e-2, batch_size=120, schedule="constant"),
    )  # fmt: skip
    before, after = (dict(m.model.named_parameters()) for m in (made, tuned))
    assert list(before) == list(after) == list(dict(fit("diag").model.named_parameters()))
    moved = [(before[n] != after[n])[mask] for n, mask in made.plan.keep.items()]
    assert torch.cat(moved).double().mean() > 0.9  # a few belong to units that no input wakes
    assert all(torch.equal(before[n][~mask], after[n][~mask]) for n, mask in made.plan.keep.items())


def test_gradual_magnitude_pruning_goes_on_from_a_sparse_network() -> None:
    """Weights that were gone stay gone, and as many more go as the target says."""
    sparse = compress(fit("point"), rules.Magnitude(0.5)).model
    recipe = GradualMagnitude(0.7, initial=0.5, begin=0.0, every=2)
    training = Training(epochs=20, lr=1e-2, batch_size=30)
    posterior = recipe.fit(sparse, table(), training=training, progress=False)
    before, after = (dict(m.named_parameters()) for m in (sparse, posterior.model))
    names = [name for name, value in before.items() if value.ndim > 1]
    assert not any(bool(after[name][before[name] == 0].any()) for name in names)
    left = sum(int((after[name] != 0).sum()) for name in names)
    assert left == sum(before[n].numel() for n in names) - round(0.7 * sum(before[n].numel() for n in names))
    with pytest.raises(InputError, match="`initial` must be at most the target"):
        GradualMagnitude(0.5, initial=0.6)


def test_gradual_magnitude_pruning_ends_at_its_target() -> None:
    training = Training(epochs=20, lr=1e-2, batch_size=30)
    posterior = GradualMagnitude(0.5, every=2).fit(fit("point").model, table(), training=training, progress=False)
    made = compress(posterior, rules.Magnitude(0.5))
    weights = [p for p in posterior.model.parameters() if p.ndim > 1]
    gone = sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)
    assert gone == pytest.approx(0.5, abs=0.01)
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), posterior.model.parameters(), strict=True))
    assert score_of(posterior, table())(posterior.model) > 0.8
    assert dubito.parse("compression.gradual_magnitude(0.5, every=2)") == GradualMagnitude(0.5, every=2)
    with pytest.raises(InputError, match=r"`target` must be .* below 1, got 1\.0"):
        GradualMagnitude(1.0)
    with pytest.raises(InputError, match=r"`begin` must be below `end`, got 0\.9 and 0\.1"):
        GradualMagnitude(0.5, begin=0.9, end=0.1)


# ---------------------------------------------------------------------- a posterior on what is left


@pytest.mark.parametrize("recipe", [Laplace(structure="diag"), Laplace(structure="full"), Variational(priors.Normal())])
def test_a_posterior_on_the_weights_that_are_left(recipe: Any) -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    posterior = made.posterior(recipe, table(), training=Training(epochs=2))
    drawn = posterior.sample(3)
    for name, mask in made.plan.keep.items():
        assert not drawn[name][:, ~mask].any()
        assert drawn[name][:, mask].std(0).gt(0).all()
    assert posterior.predict(HELD_OUT[0]).probs.shape == (120, 3)


def test_a_second_compression_goes_on_from_the_first() -> None:
    """Removed weights are not random any more; they stay removed, also under fine-tuning, and count as removed."""
    first = compress(fit("diag"), rules.PosteriorDamage(0.5))
    left = first.posterior(Laplace(structure="diag", prior_precision=1.0), table())
    again = compress(left, rules.PosteriorDamage(0.7), finetune=table(), training=Training(epochs=2))
    assert again.plan.sparsity == pytest.approx(0.7, abs=0.01)
    for before, after in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert bool((after[before == 0] == 0).all()) or before.ndim < 2


def test_a_posterior_on_a_smaller_network() -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5, scope="layer"), structure="units", data=HELD_OUT)
    posterior = made.posterior(Laplace(structure="kron"), table())
    assert posterior.selection.num_weights == sum(p.numel() for p in made.model.parameters())


def test_a_recipe_that_cannot_be_held_to_what_is_left() -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    for recipe in (MAP(), Variational(start="fresh")):
        with pytest.raises(UnsupportedError, match="cannot keep the removed weights at zero"):
            made.posterior(recipe, table())


# ---------------------------------------------------------------------- torch.nn.utils.prune


def test_torch_prune_and_back() -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    pruned = made.plan.to_torch(fit("diag").model)
    x = HELD_OUT[0]
    assert torch.equal(pruned(x), made.model(x))
    assert prune.is_pruned(pruned)
    assert not prune.is_pruned(fit("diag").model)
    back = Plan.from_torch(pruned)
    assert all(torch.equal(back.keep[name], mask) for name, mask in made.plan.keep.items())
    for layer in pruned:
        if isinstance(layer, nn.Linear):
            prune.remove(layer, "weight")
    assert all(torch.equal(pruned.state_dict()[name], value) for name, value in made.model.state_dict().items())
    with pytest.raises(InputError, match="has no masks"):
        Plan.from_torch(made.model)


# ---------------------------------------------------------------------- reports


def test_the_report_of_single_weights(tmp_path: Path) -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5), data=HELD_OUT)
    report = made.report(seconds=0.001)
    text = report.page(tmp_path / "report.html", command="dubito compress").read_text()
    for row in report.layers:
        assert f'<td data-value="{row.kept:,}">{row.kept:,}</td>' in text
    assert "Share of weights that were removed from each layer" in text
    nonzero = sum(int((p != 0).sum()) for p in made.model.parameters())
    total = sum(p.numel() for p in made.model.parameters())
    assert report.parameters == (total, total)
    assert (report.nonzeros, report.ratio) == (nonzero, total / nonzero)
    assert report.macs == (5 * 8 + 8 * 6 + 6 * 3,) * 2
    assert report.num_bytes["coded"] < report.num_bytes["before"]
    assert set(report.latency) == {1, 128}
    assert set(report.scores["after"]) == {"accuracy", "nll", "ece"}
    accuracy = dubito.evaluate(point(made.model), HELD_OUT).scores["accuracy"]
    assert report.scores["after"]["accuracy"] == pytest.approx(accuracy)
    outputs = made.dense(HELD_OUT[0])
    nats = torch.nn.functional.cross_entropy(outputs, HELD_OUT[1], reduction="sum").item()
    assert report.code_length["before"] == (8 * report.num_bytes["before"], pytest.approx(nats / math.log(2), rel=1e-5))
    assert report.code_length["coded"][0] == 8 * report.num_bytes["coded"]
    for part in ("multiply-accumulates", "bytes on disk", "latency", "coded", "bits of network + labels"):
        assert part in str(report)


def test_the_report_of_units() -> None:
    made = compress(fit("diag"), rules.Magnitude(0.5, scope="layer"), structure="units", data=HELD_OUT)
    report = made.report(seconds=0.001)
    assert [(row.units, row.units_kept) for row in report.layers] == [(8, 4), (6, 3), (3, 3)]
    assert report.macs == (106, 5 * 4 + 4 * 3 + 3 * 3)
    assert report.num_bytes["dense"] < report.num_bytes["before"]
    assert "units" in repr(made.plan)


def test_a_report_without_data_has_no_scores() -> None:
    report = compress(fit("diag"), rules.Magnitude(0.5)).report()
    with pytest.raises(MissingDataError, match="A page shows scores"):
        report.page()
    assert report.scores == {}
    assert report.latency == {}
    assert report.macs is None


def test_what_is_printed() -> None:
    made = compress(fit("diag"), rules.Magnitude(0.5))
    assert isinstance(made, Compression)
    assert "50.00% of the weights are gone" in repr(made)
    assert "0.weight" in repr(made.plan)


# ---------------------------------------------------------------------- exports


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_exports_compute_the_same(structure: Any, tmp_path: Path) -> None:
    made = compress(fit("diag"), rules.Magnitude(0.4, scope="layer"), structure=structure, data=HELD_OUT)
    found = made.export(tmp_path / "net.pt2")
    assert found.difference < 1e-6
    assert found.num_bytes == (tmp_path / "net.pt2").stat().st_size


@pytest.mark.filterwarnings("ignore")
def test_onnx_is_checked_in_onnxruntime(tmp_path: Path) -> None:
    onnxruntime = needs("onnxruntime")
    needs("onnxscript")
    made = compress(fit("diag"), rules.Magnitude(0.4, scope="layer"), structure="units", data=HELD_OUT)
    assert made.export(tmp_path / "net.onnx").difference < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for rows in (1, 7):  # the batch size is free
        x = HELD_OUT[0][:rows]
        (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), made.model(x), atol=1e-5)


def test_bad_exports(tmp_path: Path) -> None:
    made = compress(fit("diag"), rules.Magnitude(0.5))
    with pytest.raises(InputError, match="needs one batch of inputs"):
        made.export(tmp_path / "net.onnx")
    with pytest.raises(InputError, match=r"must end in .onnx or .pt2"):
        made.export(tmp_path / "net.zip", example=HELD_OUT[0])


def test_a_default_that_would_ruin_the_network_removes_less() -> None:
    """The evidence judges every weight as if the others stayed; the data say that all together cost too much."""
    torch.manual_seed(0)
    x, y = table()
    model = nn.Linear(x.shape[1], int(y.max()) + 1)
    posterior = MAP().fit(model, (x, y), training=Training(epochs=30, lr=0.05), progress=False)
    wide = Laplace(structure="diag", prior_precision=1e-6).fit(posterior.model, (x[:3] / 100, y[:3]), progress=False)
    made = compress(wide, data=HELD_OUT, allow_empty=True)
    score = score_of(wide, HELD_OUT)
    assert score(made.dense) - score(made.model) <= 0.01
    assert isinstance(made.rule, rules.PosteriorDamage)
    asked = compress(wide, rules.ModelReduction(), data=HELD_OUT, allow_empty=True)  # who asks for it knows
    assert score(asked.dense) - score(asked.model) > 0.1


def test_a_default_that_would_ruin_a_regression_removes_less() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[2.0], [1.0], [0.5]])
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 1.0, 0.5]]))
        model.bias.zero_()
    loose = Laplace(structure="diag", prior_precision=1e-6).fit(
        model, (x[:2] / 100, y[:2] / 100), likelihood=Gaussian(noise=5.0), progress=False
    )
    made = compress(loose, data=(x, y), allow_empty=True)
    score = score_of(loose, (x, y))
    assert score(made.model) >= 1.01 * score(made.dense)


def test_a_default_that_would_keep_nearly_all_removes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a narrow prior model reduction keeps nearly all weights; a hundredth of the accuracy pays for far more."""
    torch.manual_seed(0)
    digits = dubito.data.load("digits")
    model = dubito.models.mlp(64, 10, hidden=50)
    trained = MAP().fit(model, digits.train, training=Training(epochs=40, lr=1e-2), progress=False).model
    posterior = Laplace(prior_precision=2000.0).fit(trained, digits.train, progress=False)
    monkeypatch.setattr(sys.modules["dubito.uses.compression.compress"], "LITTLE", 0.2)
    with pytest.warns(UserWarning, match="give held-out data="):
        alone = dubito.compress(posterior)
    judged = dubito.compress(posterior, data=digits.validation)
    assert alone.plan.sparsity < 0.2
    assert judged.plan.sparsity > 0.4
    x, y = digits.validation
    accuracies = [float((network(x).argmax(1) == y).float().mean()) for network in (trained, judged.model)]
    assert accuracies[0] - accuracies[1] <= 0.01 + 1e-6


def test_a_normalized_row_that_would_be_empty_is_refused() -> None:
    """Its length is 0, by which weight normalization divides: outputs were NaN."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    with torch.no_grad():
        layer.weight[0] *= 1e-3
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(layer), nn.ReLU(), nn.Linear(6, 3))
    point = MAP(train=False).fit(model, (torch.randn(12, 4), torch.arange(12) % 3), progress=False)
    with pytest.raises(InputError, match="would remove a whole row of '0'"):
        compress(point, rules.Magnitude(0.5))
    assert bool(compress(point, rules.Magnitude(0.02)).model(torch.randn(2, 4)).isfinite().all())
