"""Distillation where the answer is known: students that can equal their teacher, and closed forms."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import Gaussian
from dubito.transfer import Concentration, Dirichlet, GaussianWithUncertainty
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import MAP, Laplace, Posterior, Training, Variational
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.methods.map.posterior import PointPosterior
from oracles import seeded_layers

pytestmark = pytest.mark.slow

LONG = Training(epochs=150, lr=3e-2, batch_size=32)
SHORT = Training(epochs=2, lr=1e-2, batch_size=16, shuffle=False)


def linear(inputs: int, outputs: int) -> nn.Module:
    return seeded_layers(lambda: nn.Linear(inputs, outputs), dtype=torch.float32)


def inputs(num: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(num, 3, generator=torch.Generator().manual_seed(seed))


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.7)


def classifier(recipe: Any = None) -> Posterior:
    x = inputs()
    point = MAP().fit(linear(3, 3), (x, labels(x)), training=Training(epochs=30, lr=3e-2))
    training = LONG if isinstance(recipe, Variational) else None
    return point if recipe is None else recipe.fit(point.model, (x, labels(x)), training=training)


def regressor(likelihood: Any = "gaussian", outputs: int = 1) -> Posterior:
    x = inputs()
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.2 * torch.randn(64, 1, generator=torch.Generator().manual_seed(4))
    point = MAP().fit(linear(3, outputs), (x, y), likelihood=likelihood, training=LONG)
    return Laplace(prior_precision=1.0, structure="full").fit(point.model, (x, y), likelihood=likelihood)


class Constant(nn.Module):
    """A student that gives the same outputs to all inputs: with one input it can say anything."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.values.expand(len(x), -1)


def test_a_student_of_the_same_kind_equals_its_teacher() -> None:
    teacher, x = classifier(), inputs()
    student = dubito.distill(teacher, linear(3, 3), x, training=LONG)
    assert isinstance(student, PointPosterior)
    fresh = inputs(50, seed=9)
    torch.testing.assert_close(student.predict(fresh).probs, teacher.predict(fresh).probs, rtol=0.0, atol=5e-3)  # type: ignore[attr-defined]


def test_the_student_of_a_linear_regression_in_closed_form() -> None:
    """Squared error to the teacher's means is least squares; the noise is the teacher's total, plus what is missed."""
    teacher, x = regressor(), inputs()
    student = dubito.distill(teacher, linear(3, 1), x, training=LONG)
    theirs, mine = teacher.predict(x), student.predict(x)
    assert isinstance(theirs, RegressionPrediction)
    assert isinstance(mine, RegressionPrediction)
    torch.testing.assert_close(mine.mean, theirs.mean, rtol=0.0, atol=2e-3)
    expected = (theirs.variance + (theirs.mean - mine.mean).square()).mean().sqrt()
    assert isinstance(student.likelihood, Gaussian)
    assert student.likelihood.noise == pytest.approx(float(expected), rel=1e-5)


def test_noise_and_function_variance_are_kept() -> None:
    teacher, x = regressor(), inputs(1).expand(64, 3)
    training = Training(epochs=300, lr=5e-2, batch_size=64)
    student = dubito.distill(teacher, Constant(3), x, "distribution", training=training)
    theirs, mine = teacher.predict(x[:1]), student.predict(x[:1])
    assert student.likelihood == GaussianWithUncertainty()
    for name in ("mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=2e-3, atol=2e-3)


def test_a_dirichlet_keeps_the_mutual_information() -> None:
    teacher, x = classifier(Variational(initial_scale=0.5, temperature=1.0)), inputs(1).expand(64, 3)
    training = Training(epochs=1000, lr=5e-2, batch_size=64)
    student = dubito.distill(teacher, Constant(3), x, "distribution", training=training)
    theirs, mine = teacher.predict(x[:1]), student.predict(x[:1])
    assert student.likelihood == Dirichlet()
    assert isinstance(theirs, ClassPrediction)
    assert float(theirs.epistemic) > 0.005
    for name in ("probs", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=5e-3, atol=1e-3)


def test_uncertainty_far_from_the_data_is_learned_from_inputs_there() -> None:
    teacher = classifier(Laplace(prior_precision=1.0))
    transfer = torch.cat([inputs(), 6 * inputs(64, seed=2)])
    network = seeded_layers(lambda: nn.Linear(3, 32), nn.ReLU, lambda: nn.Linear(32, 3), dtype=torch.float32)
    student = dubito.distill(teacher, network, transfer, "distribution", training=LONG)
    new = torch.cat([inputs(100, seed=5), 6 * inputs(100, seed=6)])
    mine, theirs = (posterior.predict(new).epistemic for posterior in (student, teacher))  # type: ignore[attr-defined]
    assert float(torch.corrcoef(torch.stack([mine.log(), theirs.log()]))[0, 1]) > 0.8


def test_yes_and_no() -> None:
    x = inputs()
    y = (x[:, 0] > 0).float()
    teacher = MAP().fit(linear(3, 1), (x, y), likelihood="bernoulli", training=Training(epochs=20, lr=3e-2))
    student = dubito.distill(teacher, linear(3, 1), x, training=LONG)
    torch.testing.assert_close(student.predict(x).probs, teacher.predict(x).probs, rtol=0.0, atol=1e-2)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="gives 2 outputs per input, but the mean of 1 yes/no label needs 1"):
        dubito.distill(teacher, linear(3, 2), x)
    beta = dubito.distill(Variational().fit(teacher.model, (x, y), likelihood="bernoulli", training=SHORT),
                          linear(3, 2), x, "distribution", training=SHORT)  # fmt: skip
    assert beta.likelihood == Dirichlet()


def test_a_heteroscedastic_teacher() -> None:
    teacher, x = regressor("heteroscedastic", outputs=2), inputs()
    student = dubito.distill(teacher, linear(3, 2), x, training=LONG)
    theirs, mine = teacher.predict(x), student.predict(x)
    torch.testing.assert_close(mine.mean, theirs.mean, rtol=0.0, atol=0.05)  # type: ignore[attr-defined]
    torch.testing.assert_close(mine.stddev, theirs.stddev, rtol=0.2, atol=0.0)  # type: ignore[attr-defined]


def test_all_kinds_of_data_teach_the_same() -> None:
    x = inputs(48)
    teacher = classifier(Variational())
    kinds: list[Any] = [
        x, x.numpy(), (x, labels(x)), TensorDataset(x, labels(x)), DataLoader(TensorDataset(x), 16),
        DataLoader(TensorDataset(x, labels(x)), 16), [(part, labels(part)) for part in x.split(16)], TensorDataset(x),
    ]  # fmt: skip
    students = [dubito.distill(teacher, linear(3, 3), kind, training=SHORT) for kind in kinds]
    for student in students:  # a teacher answers 48 rows and 3 times 16 rows alike, but for rounding
        assert student.num_data == 48
        torch.testing.assert_close(student.mean(), students[0].mean(), rtol=1e-5, atol=1e-6)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Inputs that are shaken anew each time."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return inputs(48)[index] + torch.randn(3), torch.tensor(0)


def test_a_loader_that_augments_is_answered_as_it_comes() -> None:
    teacher = classifier(Variational())
    runs = [dubito.distill(teacher, linear(3, 3), Augmented(), training=SHORT) for _ in range(2)]
    assert runs[0].digest() == runs[1].digest()
    assert runs[0].num_data == 48
    assert runs[0].digest() != dubito.distill(teacher, linear(3, 3), inputs(48), training=SHORT).digest()


def test_it_is_a_posterior_that_is_saved_evaluated_and_learns_on(tmp_path: Path) -> None:
    x = inputs()
    for keep in ("mean", "distribution"):
        student = dubito.distill(classifier(Variational()), linear(3, 3), x, keep, training=SHORT)  # type: ignore[arg-type]
        student.save(tmp_path / keep)
        again = dubito.load(tmp_path / keep, linear(3, 3))
        assert again.digest() == student.digest()
        assert torch.equal(again.predict(x).epistemic, student.predict(x).epistemic)  # type: ignore[attr-defined]
        assert dubito.evaluate(student, (x, labels(x))).scores["nll"] < 2
        assert student.update((x, labels(x)), training=SHORT).num_data == 128
        assert type(student.model) is nn.Sequential


def test_validation_stops_the_lesson() -> None:
    training = Training(epochs=50, lr=3e-1, early_stopping=2)
    options: dict[str, Any] = {"training": training, "validation": inputs(32, seed=3)}
    assert dubito.distill(classifier(), linear(3, 3), inputs(), **options).num_data == 64
    with pytest.raises(InputError, match="pass `validation=`"):
        dubito.distill(classifier(), linear(3, 3), inputs(), training=training)


def test_nothing_of_the_users_changes() -> None:
    teacher, student, x = classifier(Variational()), linear(3, 3), inputs()
    before, digest, kept = copy.deepcopy(student.state_dict()), teacher.digest(), x.clone()
    state = torch.get_rng_state()
    dubito.distill(teacher, student, x, training=SHORT)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert teacher.digest() == digest
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)


def test_distillation_faults() -> None:
    teacher, x = classifier(), inputs()
    with pytest.raises(InputError, match="student gives 7 outputs per input, but the mean over 3 classes needs 3: "):
        dubito.distill(teacher, linear(3, 7), x)
    with pytest.raises(InputError, match="gives 1 output per input, but a Dirichlet over 3 classes needs 3"):
        dubito.distill(teacher, linear(3, 1), x, "distribution")
    with pytest.raises(
        InputError, match="gives 2 outputs per input, but mean, noise and function variance of 1 number needs 3"
    ):
        dubito.distill(regressor(), linear(3, 2), x, "distribution")
    with pytest.raises(InputError, match="gives 2 outputs per input, but the mean of 1 number needs 1"):
        dubito.distill(regressor(), linear(3, 2), x)
    with pytest.raises(InputError, match="cannot be called on a batch of inputs"):
        dubito.distill(teacher, linear(5, 3), x)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got 'student'"):
        dubito.distill(teacher, "student", x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`posterior` must be a posterior"):
        dubito.distill(linear(3, 3), linear(3, 3), x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`keep` must be 'mean' or 'distribution'"):
        dubito.distill(teacher, linear(3, 3), x, "all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="empty"):
        dubito.distill(teacher, linear(3, 3), x[:0])
    with pytest.raises(InputError, match="NaN or infinite"):
        dubito.distill(teacher, linear(3, 3), torch.full((4, 3), math.nan))


def test_the_weight_of_the_concentration() -> None:
    """The more it counts, the closer the uncertainty comes to that of the teacher; the default is 0.02."""
    teacher, x = classifier(Variational()), inputs()
    wanted = Concentration().answers(teacher.predict(x))[:, -1]
    long = Training(epochs=60, lr=3e-2, batch_size=64)

    def distance(weight: float | None) -> float:
        student = dubito.distill(teacher, linear(3, 3), x, "distribution", training=long, concentration_weight=weight)
        return float((student.model(x).detach().logsumexp(-1) - wanted).square().mean())

    assert distance(None) == distance(0.02)
    assert distance(1.0) < distance(0.02) < distance(1e-4)
    for wrong in (0.0, -1.0, math.inf, "much"):
        with pytest.raises(InputError, match="must be a positive number"):
            dubito.distill(teacher, linear(3, 3), x, "distribution", concentration_weight=wrong)  # type: ignore[arg-type]
    for case in ((teacher, linear(3, 3), x, "mean"), (regressor(), linear(3, 3), x, "distribution")):
        with pytest.raises(InputError, match="`concentration_weight` is for classes with keep='distribution'"):
            dubito.distill(*case, concentration_weight=0.1)  # type: ignore[arg-type]


def test_a_softened_lesson_has_the_same_end() -> None:
    """A student that can be its teacher becomes it at every temperature; what has no classes cannot be softened."""
    teacher, x = classifier(MAP()), inputs()
    long = Training(epochs=150, lr=3e-2, batch_size=64)
    student = dubito.distill(teacher, copy.deepcopy(teacher.model), x, training=long, temperature=3.0)
    torch.testing.assert_close(student.predict(x).probs, teacher.predict(x).probs, rtol=0, atol=1e-3)
    for case in ((teacher, linear(3, 3), x, "distribution"), (regressor(), linear(3, 1), x, "mean")):
        with pytest.raises(InputError, match="temperature softens answers that are the mean over classes"):
            dubito.distill(*case, temperature=2.0)  # type: ignore[arg-type]


def test_a_teacher_that_does_not_know_numbers() -> None:
    teacher = regressor()
    assert isinstance(teacher.model, nn.Sequential)
    broken = PointPosterior(copy.deepcopy(teacher.model), Gaussian(noise=1.0), MAP(train=False), 64)
    with torch.no_grad():
        broken.model[0].bias.fill_(math.nan)  # type: ignore[index, union-attr]
    with pytest.raises(InputError, match="holds NaN or infinite values"):
        dubito.distill(broken, linear(3, 1), inputs())


def test_a_lesson_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The checkpoint of a run that was stopped early belongs to the same lesson, and leads to the same student."""
    teacher, x = classifier(Variational()), inputs()
    training = SHORT.replace(epochs=4, checkpoint=str(tmp_path / "lesson"), checkpoint_every=0.0)
    whole = dubito.distill(teacher, linear(3, 3), x, training=SHORT.replace(epochs=4))

    class Stop(Exception):
        pass

    class Interrupted(nn.Linear):
        """Stops the run in its third epoch."""

        calls = 0

        def forward(self, given: Tensor) -> Tensor:
            Interrupted.calls += 1
            if Interrupted.calls == 12:
                raise Stop
            return super().forward(given)

    student = nn.Sequential(Interrupted(3, 3))
    student.load_state_dict(linear(3, 3).state_dict())
    with pytest.raises(Stop):
        dubito.distill(teacher, student, x, training=training)
    again = dubito.distill(teacher, student, x, training=training)
    torch.testing.assert_close(again.mean(), whole.mean(), rtol=0.0, atol=0.0)
