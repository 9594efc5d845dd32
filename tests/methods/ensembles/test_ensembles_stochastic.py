"""Networks that are random by the batches or by the inputs they see: `BatchNormNoise` and `TestTimeAugmentation`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.ensembles import BatchNormNoise, TestTimeAugmentation
from dubito.errors import InputError, UnsupportedError
from ensemble_cases import TRAINING, classes, convolutional, dense, images, normalized
from torch import nn

import dubito
from dubito import MAP, Ensemble, Laplace, Variational
from dubito.core import params
from dubito.methods.ensembles.augmentation import Change
from dubito.networks.normalization import batch_statistics
from oracles import seeded_layers

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def fit(recipe: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    return recipe.fit(model or normalized(), data or classes(), **{"training": TRAINING, **options})


class TestBatchNormNoise:
    def test_statistics_are_those_that_training_mode_uses(self) -> None:
        """With them in place, evaluation mode gives for a batch what training mode gives for it."""
        x, _ = images()
        model = seeded_layers(
            lambda: nn.Conv2d(1, 3, 3), lambda: nn.BatchNorm2d(3), nn.ReLU, nn.Flatten,
            lambda: nn.Linear(48, 5), lambda: nn.BatchNorm1d(5), lambda: nn.Linear(5, 2),
        ).eval()  # fmt: skip
        before = copy.deepcopy(model.state_dict())
        found = batch_statistics(model, x)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model[1].momentum == 0.1
        assert not any(module.training or module._forward_pre_hooks for module in model.modules())
        placed = params.load_(copy.deepcopy(model), found).eval()
        torch.testing.assert_close(placed(x), copy.deepcopy(model).train()(x), **EXACT)

    def test_is_the_mixture_over_training_batches(self) -> None:
        x, _ = classes()
        found = fit(BatchNormNoise(num_samples=3), training=TRAINING.replace(shuffle=False))
        outputs = []
        for start in (0, 16, 32):
            statistics = batch_statistics(found.model, x[start : start + 16])
            placed = params.load_(copy.deepcopy(found.model), statistics)
            outputs.append(placed.eval()(x).softmax(-1))
        prediction = found.predict(x, num_samples=3)
        torch.testing.assert_close(prediction.probs, torch.stack(outputs).mean(0).detach(), **EXACT)
        assert float(prediction.epistemic.max()) > 0
        torch.testing.assert_close(found.predict(x, method="mean").probs, found.model(x).softmax(-1).detach(), **EXACT)

    def test_one_pass_may_be_too_short(self) -> None:
        found = fit(BatchNormNoise(num_samples=9))
        assert len(found.statistics["1.running_mean"]) == 9
        assert len(found.statistics["1.running_mean"].unique(dim=0)) == 9  # each pass has another order

    def test_smaller_batches_are_noisier(self) -> None:
        model, x = fit(MAP()).model, classes()[0]
        doubt = [
            fit(BatchNormNoise(train=False), model, training=TRAINING.replace(batch_size=size)).predict(x).epistemic
            for size in (5, 25)
        ]
        assert float(doubt[0].mean()) > 2 * float(doubt[1].mean())

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        found, (x, _) = fit(BatchNormNoise(num_samples=4)), classes()
        found.save(tmp_path / "posterior")
        again = dubito.load(tmp_path / "posterior", normalized())
        assert again.digest() == found.digest()
        assert torch.equal(again.predict(x, num_samples=4).probs, found.predict(x, num_samples=4).probs)

    def test_bad_questions_are_one_sentence(self) -> None:
        with pytest.raises(InputError, match="needs a BatchNorm layer with running statistics"):
            fit(BatchNormNoise(), dense())
        with pytest.raises(InputError, match="at least 1"):
            BatchNormNoise(num_samples=0)
        with pytest.raises(InputError, match="untrained network"):
            BatchNormNoise(train=False, start="fresh")
        found = fit(BatchNormNoise(num_samples=2))
        for method in (found.marginals, found.prior, lambda: found.sample(2)):
            with pytest.raises(UnsupportedError, match="batch statistics, not random weights"):
                method()
        with pytest.raises(InputError, match="statistics of 2 batches are stored, got num_samples=5"):
            found.predict(classes()[0], num_samples=5)
        with pytest.raises(InputError, match="no predict option 'colour'"):
            found.predict(classes()[0], colour="red")
        with pytest.raises(InputError, match="one example has no variance"):
            fit(BatchNormNoise(train=False), training=TRAINING.replace(batch_size=1))


class TestAugmentation:
    def test_a_shift_moves_zeros_in(self) -> None:
        x = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
        moved = Change(False, 1, -1, 0.0, 0)(x)
        assert moved[0, 0].tolist() == [[0.0, 0.0, 0.0], [2.0, 3.0, 0.0], [5.0, 6.0, 0.0]]
        assert torch.equal(Change(False, 0, 0, 0.0, 0)(x), x)

    def test_draws_cover_what_they_may(self) -> None:
        generator, recipe = torch.Generator().manual_seed(0), TestTimeAugmentation(flip=True, shift=1)
        drawn = [Change.drawn(recipe, generator) for _ in range(600)]
        kinds = {(change.mirrored, change.down, change.right) for change in drawn}
        assert len(kinds) == 18
        assert sum(change.mirrored for change in drawn) == pytest.approx(300, abs=60)
        assert sum(change.down == 1 for change in drawn) == pytest.approx(200, abs=50)

    def test_is_the_mixture_over_changed_inputs(self) -> None:
        x, y = images()
        found = fit(TestTimeAugmentation(flip=True, shift=1, noise=0.1), convolutional(), (x, y))
        generator = torch.Generator().manual_seed(2)
        changes = [Change.drawn(found.recipe, generator) for _ in range(6)]
        expected = torch.stack([found.model(change(x)).softmax(-1) for change in changes]).mean(0)
        prediction = found.predict(x, num_samples=6, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(prediction.probs, expected.detach(), **EXACT)

    def test_every_draw_meets_one_of_the_posterior(self) -> None:
        x, _ = classes()
        found = fit(TestTimeAugmentation(recipe=Variational(), noise=0.1), dense())
        assert found.predict(x, num_samples=5).samples.shape[0] == 5
        assert all(torch.equal(found.marginals()[1][name], v) for name, v in found.inner.marginals()[1].items())

    @pytest.mark.slow
    def test_over_laplace_and_within_an_ensemble(self) -> None:
        model = fit(MAP(), dense()).model
        recipe = TestTimeAugmentation(recipe=Laplace(prior_precision=1.0), noise=0.1)
        found = fit(recipe, model, training=None)
        assert torch.equal(found.log_evidence(), found.inner.log_evidence())
        several = fit(Ensemble(members=2, recipe=recipe), dense())
        assert len(several.members) == 2
        assert several.predict(classes()[0], num_samples=3).samples.shape[0] == 6

    def test_by_text(self) -> None:
        recipe = TestTimeAugmentation(recipe=Laplace(), noise=0.1)
        assert repr(recipe) == "ensembles.TestTimeAugmentation(recipe=Laplace(), noise=0.1)"
        assert dubito.parse(repr(recipe)) == dubito.parse("test-time-augmentation(laplace(), noise=0.1)") == recipe
        assert dubito.parse("batch-norm-noise(8)") == BatchNormNoise(8)

    def test_bad_questions_are_one_sentence(self) -> None:
        with pytest.raises(InputError, match="needs at least one change"):
            TestTimeAugmentation()
        with pytest.raises(InputError, match="must be a recipe"):
            TestTimeAugmentation(recipe="map", flip=True)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="of at least 0"):
            TestTimeAugmentation(shift=-1)
        with pytest.raises(InputError, match="are not images"):
            fit(TestTimeAugmentation(shift=3), dense()).predict(classes()[0])
        with pytest.raises(InputError, match="one floating-point tensor"):
            Change(True, 0, 0, 0.0, 0)((torch.zeros(2, 3, 3),))
