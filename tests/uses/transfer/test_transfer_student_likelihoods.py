"""The likelihoods of distribution-keeping students and of their lessons, against closed forms and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import Categorical
from dubito.transfer import (
    Concentration,
    Dirichlet,
    GaussianWithUncertainty,
    GaussianWithUncertaintyMoments,
    Moments,
    SoftBernoulli,
    SoftLabels,
)
from torch import Tensor

import dubito
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.core.settings import Setting
from dubito.uses.transfer.distillation_losses import LOG_CONCENTRATIONS, expected_log_normal, match_concentration
from dubito.uses.transfer.student_likelihoods import dirichlet_entropies

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
OUTPUTS = torch.randn(5, 6, generator=GENERATOR, dtype=torch.float64)  # two numbers
TARGETS = torch.randn(5, 2, generator=GENERATOR, dtype=torch.float64)


class TestDirichlet:
    def test_its_entropies_are_those_of_many_draws(self) -> None:
        prediction = Dirichlet().predict(LOGITS)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws = torch.distributions.Dirichlet(LOGITS.exp()).sample((100_000,))
        entropies = torch.special.entr(draws).sum(-1)
        error = 5 * entropies.std(0) / math.sqrt(len(draws))
        assert bool(((entropies.mean(0) - prediction.aleatoric).abs() < error).all())
        total = torch.special.entr(LOGITS.softmax(-1)).sum(-1)
        torch.testing.assert_close(prediction.entropy, total, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(prediction.probs, LOGITS.softmax(-1), rtol=1e-12, atol=1e-12)

    def test_a_uniform_pair_in_closed_form(self) -> None:
        """Of Dir(1, 1) the mean entropy is ∫ −2 p log p dp = 1/2."""
        total, aleatoric = dirichlet_entropies(torch.zeros(2))
        assert total.item() == pytest.approx(math.log(2), abs=1e-12)
        assert aleatoric.item() == pytest.approx(0.5, abs=1e-12)

    def test_to_labels_it_is_categorical(self) -> None:
        labels = torch.tensor([0, 1, 2, 3, 0, 1])
        assert torch.equal(Dirichlet().log_prob(LOGITS, labels), Categorical().log_prob(LOGITS, labels))
        assert torch.equal(Dirichlet().hessian(LOGITS), Categorical().hessian(LOGITS))

    def test_several_samples_are_a_mixture(self) -> None:
        same = Dirichlet().predict_samples(LOGITS.expand(3, 6, 4))
        alone = Dirichlet().predict(LOGITS)
        for name in ("log_probs", "aleatoric", "epistemic"):
            torch.testing.assert_close(getattr(same, name), getattr(alone, name), rtol=1e-10, atol=1e-10)
        two = Dirichlet().predict_samples(torch.stack([LOGITS, -LOGITS]))
        probs = (LOGITS.softmax(-1) + (-LOGITS).softmax(-1)) / 2
        torch.testing.assert_close(two.probs, probs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(two.entropy, torch.special.entr(probs).sum(-1), rtol=1e-10, atol=1e-10)

    def test_a_temperature_leaves_the_concentration(self) -> None:
        for logits, axis in ((LOGITS, -1), (LOGITS.reshape(1, 4, 2, 3), 1)):
            outputs, likelihood = Dirichlet().temper(logits, 3.0)
            assert likelihood == Dirichlet()
            torch.testing.assert_close(outputs.logsumexp(axis), logits.logsumexp(axis), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(outputs.softmax(axis), (logits / 3).softmax(axis), rtol=1e-12, atol=1e-12)


class TestGaussianWithUncertainty:
    def total(self) -> tuple[Tensor, Tensor]:
        means, noise, doubt = OUTPUTS.chunk(3, dim=-1)
        return means, noise.exp() + doubt.exp()

    def test_density_and_prediction(self) -> None:
        means, variance = self.total()
        expected = torch.distributions.Normal(means, variance.sqrt()).log_prob(TARGETS).sum(-1)
        torch.testing.assert_close(
            GaussianWithUncertainty().log_prob(OUTPUTS, TARGETS), expected, rtol=1e-12, atol=1e-12
        )
        prediction = GaussianWithUncertainty().predict(OUTPUTS)
        torch.testing.assert_close(prediction.log_prob(TARGETS), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(prediction.epistemic, OUTPUTS[:, 4:].exp(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(prediction.aleatoric, OUTPUTS[:, 2:4].exp(), rtol=1e-12, atol=1e-12)

    def test_derivatives(self) -> None:
        leaf = OUTPUTS.clone().requires_grad_()
        (slope,) = torch.autograd.grad(-GaussianWithUncertainty().log_prob(leaf, TARGETS).sum(), leaf)
        torch.testing.assert_close(GaussianWithUncertainty().gradient(OUTPUTS, TARGETS), slope, rtol=1e-10, atol=1e-10)
        hessian, root = GaussianWithUncertainty().hessian(OUTPUTS), GaussianWithUncertainty().hessian_root(OUTPUTS)
        torch.testing.assert_close(torch.einsum("rbi,rbj->bij", root, root), hessian, rtol=1e-12, atol=1e-12)
        # The Fisher information is E[g gᵀ] over targets: exact by Gauss-Hermite quadrature, here one output at a time.
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        one = OUTPUTS[:, [0, 2, 4]]
        means, variance = one[:, :1], one[:, 1:2].exp() + one[:, 2:].exp()
        fisher = torch.zeros(5, 3, 3, dtype=torch.float64)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            gradient = GaussianWithUncertainty().gradient(one, means + variance.sqrt() * node)
            fisher += weight * torch.einsum("bi,bj->bij", gradient, gradient)
        torch.testing.assert_close(GaussianWithUncertainty().hessian(one), fisher, rtol=1e-9, atol=1e-9)

    def test_draws_and_temperature(self) -> None:
        means, variance = self.total()
        draws = torch.stack([GaussianWithUncertainty().sample(OUTPUTS, generator=GENERATOR) for _ in range(4000)])
        assert bool(((draws.mean(0) - means).abs() < 5 * (variance / 4000).sqrt()).all())
        torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=0.0)
        outputs, likelihood = GaussianWithUncertainty().temper(OUTPUTS, 2.0)
        hot = likelihood.predict(outputs)
        assert isinstance(hot, RegressionPrediction)
        torch.testing.assert_close(hot.variance, 4 * variance, rtol=1e-12, atol=1e-12)

    def test_shapes_that_do_not_fit(self) -> None:
        with pytest.raises(InputError, match="needs outputs"):
            GaussianWithUncertainty().predict(torch.zeros(2, 4))
        with pytest.raises(InputError, match="must have shape"):
            GaussianWithUncertainty().check(torch.zeros(2, 3), torch.zeros(2, 2))


class TestLessons:
    def test_the_concentration_is_found_again(self) -> None:
        levels = torch.linspace(-2, 10, 40, dtype=torch.float64)
        logits = LOGITS[:1].log_softmax(-1) + levels[:, None]
        total, aleatoric = dirichlet_entropies(logits)
        found = match_concentration(logits.softmax(-1), total - aleatoric)
        torch.testing.assert_close(found, levels, rtol=1e-6, atol=1e-6)
        ends = match_concentration(LOGITS[:2].softmax(-1), torch.tensor([9.0, 0.0]))
        torch.testing.assert_close(ends, torch.tensor(LOG_CONCENTRATIONS, dtype=torch.float64), rtol=1e-6, atol=1e-6)

    def test_soft_labels_are_the_mean_over_hard_ones(self) -> None:
        probs = LOGITS.flip(0).softmax(-1)
        expected = sum(probs[:, c] * Categorical().log_prob(LOGITS, torch.full((6,), c)) for c in range(4))
        torch.testing.assert_close(SoftLabels().log_prob(LOGITS, probs), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            SoftLabels().gradient(LOGITS, probs), LOGITS.softmax(-1) - probs, rtol=1e-10, atol=1e-12
        )

    def test_softened_labels_are_those_of_softened_networks(self) -> None:
        """T² times the expected log-probability at logits over T; gradients T (p − p̄), of one size for every T."""
        lesson, teacher = SoftLabels(temperature=2.0), LOGITS.flip(0)
        answers = lesson.answers(ClassPrediction.from_logits(teacher))
        torch.testing.assert_close(answers, (teacher / 2).softmax(-1), rtol=1e-12, atol=1e-12)
        expected = 4 * SoftLabels().log_prob(LOGITS / 2, answers)
        torch.testing.assert_close(lesson.log_prob(LOGITS, answers), expected, rtol=1e-12, atol=1e-12)
        gradient = 2 * ((LOGITS / 2).softmax(-1) - answers)
        torch.testing.assert_close(lesson.gradient(LOGITS, answers), gradient, rtol=1e-10, atol=1e-12)
        with pytest.raises(InputError, match="temperature"):
            SoftLabels(temperature=0.0)

    def test_soft_yes_and_no(self) -> None:
        logits, yes = LOGITS[:, :2], LOGITS[:, 2:].sigmoid()
        expected = (yes * logits.sigmoid().log() + (1 - yes) * (1 - logits.sigmoid()).log()).sum(-1)
        torch.testing.assert_close(SoftBernoulli().log_prob(logits, yes), expected, rtol=1e-10, atol=1e-10)

    def test_expected_log_densities_are_integrals(self) -> None:
        """The integrand is a square, for which three quadrature nodes are exact."""
        mean, variance, m, s = OUTPUTS[:, :1], OUTPUTS[:, 1:2].exp(), OUTPUTS[:, 2:3], OUTPUTS[:, 3:4]
        nodes, weights = np.polynomial.hermite_e.hermegauss(3)
        normal = torch.distributions.Normal(m, (0.5 * s).exp())
        integral = sum(
            weight * normal.log_prob(mean + variance.sqrt() * node)
            for node, weight in zip(nodes, weights / weights.sum(), strict=True)
        )
        found = expected_log_normal(mean, variance, m, s)
        torch.testing.assert_close(found, integral[:, 0], rtol=1e-10, atol=1e-10)  # type: ignore[index]
        moments = Moments().log_prob(torch.cat([m, s], -1), torch.cat([mean, variance], -1))
        torch.testing.assert_close(moments, found, rtol=1e-12, atol=1e-12)

    def test_each_lesson_is_best_at_the_teachers_answer(self) -> None:
        classes = Dirichlet().predict(LOGITS)
        numbers = GaussianWithUncertainty().predict(OUTPUTS)
        cases = [
            (SoftLabels(), ClassPrediction.from_logits(LOGITS), LOGITS),
            (Concentration(), classes, LOGITS),
            (GaussianWithUncertaintyMoments(), numbers, OUTPUTS),
            (Moments(), numbers, torch.cat([OUTPUTS[:, :2], numbers.variance.log()], -1)),
        ]
        for lesson, prediction, best in cases:
            gradient = lesson.gradient(best, lesson.answers(prediction))
            assert float(gradient.abs().max()) < 1e-6, lesson
            moved = best + 0.1 * torch.randn(best.shape, generator=GENERATOR, dtype=torch.float64)
            worse = lesson.log_prob(moved, lesson.answers(prediction))
            assert bool((worse < lesson.log_prob(best, lesson.answers(prediction))).all())

    def test_positions_are_summed(self) -> None:
        prediction = Dirichlet().predict(LOGITS)
        flat, deep = Concentration().answers(prediction), Concentration().answers(Dirichlet().predict(LOGITS[None]))
        loss = Concentration().log_prob(LOGITS.flip(0), flat).sum()
        assert Concentration().log_prob(LOGITS.flip(0)[None], deep).item() == pytest.approx(float(loss), rel=1e-9)
        assert bool(Concentration().observed(deep).all())


@pytest.mark.parametrize("likelihood", [Dirichlet(), GaussianWithUncertainty()])
def test_settings_travel(likelihood: Setting) -> None:
    assert Setting.from_json(likelihood.to_json()) == likelihood


def test_former_names_are_read_and_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"transfer\.GaussianWithUncertainty"):
        assert dubito.transfer.NoiseAndDoubt is GaussianWithUncertainty
    for cls in (GaussianWithUncertainty, GaussianWithUncertaintyMoments):
        saved = {**cls().to_json(), "$setting": cls.setting_name.replace("GaussianWithUncertainty", "NoiseAndDoubt")}
        assert Setting.from_json(saved) == cls()
