"""Every likelihood: gradient, Hessian, its root and Fisher columns against autograd, enumeration and quadrature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Dirichlet,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MixtureDensity,
    MultivariateGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Quantile,
    StudentT,
)
from scipy import stats
from torch import Tensor

pytestmark = pytest.mark.slow

LEARNED = {"log_noise": torch.tensor(math.log(0.3), dtype=torch.float64)}
NUMBERS = {name: torch.tensor(0.4, dtype=torch.float64) for name in ("log_dispersion", "log_dof")}


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _labels(num_classes: int, *shape: int) -> Tensor:
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(7))


def _some_ignored(labels: Tensor, index: int = -100) -> Tensor:
    return torch.where(torch.arange(labels.numel()).reshape(labels.shape) % 3 == 1, index, labels)


# name: (likelihood, outputs, targets, hyper)
CASES: dict[str, tuple[Likelihood, Tensor, Tensor, Any]] = {
    "categorical": (Categorical(), 2 * _normal(4, 5), _labels(5, 4), None),
    "categorical-ignored": (Categorical(), 2 * _normal(4, 5), _some_ignored(_labels(5, 4)), None),
    "categorical-sequence": (Categorical(), _normal(3, 4, 5), _some_ignored(_labels(5, 3, 4)), None),
    "categorical-image": (Categorical(255), _normal(2, 3, 4, 5), _some_ignored(_labels(3, 2, 4, 5), 255), None),
    "bernoulli-flat": (Bernoulli(), 2 * _normal(6), _labels(2, 6), None),
    "bernoulli-column": (Bernoulli(), 2 * _normal(6, 1), _labels(2, 6).double(), None),
    "bernoulli-many": (Bernoulli(), 2 * _normal(4, 3), _labels(2, 4, 3).bool(), None),
    "gaussian": (Gaussian(noise=0.7), _normal(4, 3), _normal(4, 3) + 1, None),
    "gaussian-flat": (Gaussian(noise=2), _normal(4), _normal(4, 1) + 1, None),
    "gaussian-learned": (Gaussian(), _normal(4, 2), _normal(4, 2) - 1, LEARNED),
    "heteroscedastic": (HeteroscedasticGaussian(), _normal(4, 6), _normal(4, 3), None),
    "heteroscedastic-flat": (HeteroscedasticGaussian(), _normal(5, 2), _normal(5), None),
    "multivariate": (MultivariateGaussian(((1.0, 0.4), (0.4, 0.5))), _normal(4, 2), _normal(4, 2) + 1, None),
    "multivariate-diagonal": (MultivariateGaussian((0.3,)), _normal(4), _normal(4, 1) + 1, None),
    "poisson": (Poisson(), _normal(4, 2), _labels(6, 4, 2), None),
    "negative-binomial": (NegativeBinomial(0.7), _normal(5), _labels(6, 5).double(), None),
    "negative-binomial-learned": (NegativeBinomial(), _normal(4, 2), _labels(6, 4, 2), NUMBERS),
    "student-t": (StudentT(4.5), _normal(4, 2), _normal(4) + 1, None),
    "student-t-learned": (StudentT("learn"), _normal(4, 4), _normal(4, 2) + 1, NUMBERS),
    "quantile": (Quantile(0.8), _normal(4, 4), _normal(4, 2) + 1, None),
    "dirichlet": (Dirichlet(), _normal(4, 3), _normal(4, 3).softmax(-1), None),
    "ordinal": (Ordinal(), _normal(6, 3), _labels(4, 6), None),
    "bradley-terry": (BradleyTerry(), _normal(5, 2, 1), _labels(2, 5), None),
    "mixture-density": (MixtureDensity(2), _normal(3, 12), _normal(3, 2) + 1, None),
}
EXPECTED_HESSIAN = (
    "heteroscedastic", "negative-binomial", "student-t", "ordinal", "mixture-density", "quantile", "dirichlet"
)  # fmt: skip
EXACT_HESSIAN = [name for name in CASES if not name.startswith(EXPECTED_HESSIAN)]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Likelihood, Tensor, Tensor, Any]:
    return CASES[request.param]


def _loss(likelihood: Likelihood, targets: Tensor, hyper: Any) -> Any:
    return lambda outputs: -likelihood.log_prob(outputs, targets, hyper).sum()


def _dense(blocks: Tensor) -> Tensor:
    """Lay [B, *positions, C, C] out as the Hessian over all canonical entries: blocks on the diagonal."""
    return torch.block_diag(*blocks.flatten(0, -3))


def _dense_hessian(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Any) -> Tensor:
    """The Hessian by autograd, over the flattened canonical entries."""
    canonical = likelihood.canonical(outputs)

    def loss(flat: Tensor) -> Tensor:
        restored = likelihood.restore(flat.reshape(canonical.shape), outputs)
        return -likelihood.log_prob(restored, targets, hyper).sum()

    return torch.func.jacrev(torch.func.grad(loss))(canonical.flatten())


def test_log_prob_is_one_number_per_datum(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    likelihood.check(outputs, targets)
    values = likelihood.log_prob(outputs, targets, hyper)
    assert values.shape == (len(outputs),)
    assert values.dtype == outputs.dtype
    alone = torch.cat([likelihood.log_prob(outputs[i : i + 1], targets[i : i + 1], hyper) for i in range(len(outputs))])
    torch.testing.assert_close(values, alone, rtol=1e-14, atol=1e-14)


def test_restore_undoes_canonical_with_leading_axes(case: Any) -> None:
    likelihood, outputs, _, _ = case
    canonical = likelihood.canonical(outputs)
    assert torch.equal(likelihood.restore(canonical, outputs), outputs)
    stacked = torch.stack([canonical, 2 * canonical])
    assert torch.equal(likelihood.restore(stacked, outputs), torch.stack([outputs, 2 * outputs]))
    assert likelihood.num_outputs(outputs) == canonical.shape[-1]


def test_gradient_equals_autograd(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    expected = torch.func.grad(_loss(likelihood, targets, hyper))(outputs)
    gradient = likelihood.gradient(outputs, targets, hyper)
    assert gradient.shape == likelihood.canonical(outputs).shape
    torch.testing.assert_close(likelihood.restore(gradient, outputs), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", EXACT_HESSIAN)
def test_hessian_equals_autograd(name: str) -> None:
    likelihood, outputs, targets, hyper = CASES[name]
    hessian = likelihood.hessian(outputs, targets, hyper)
    expected = _dense_hessian(likelihood, outputs, targets, hyper)
    torch.testing.assert_close(_dense(hessian), expected, rtol=1e-12, atol=1e-13)


def test_heteroscedastic_hessian_is_the_expected_one() -> None:
    likelihood, outputs, _, _ = CASES["heteroscedastic-flat"]
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)  # exact for polynomials up to degree 15; degree 2 is needed
    expected = torch.zeros(10, 10, dtype=torch.float64)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        targets = outputs[:, 0] + node * (0.5 * outputs[:, 1]).exp()
        expected += weight * _dense_hessian(likelihood, outputs, targets, None)
    torch.testing.assert_close(_dense(likelihood.hessian(outputs)), expected, rtol=1e-12, atol=1e-12)


def _expectation(likelihood: Likelihood, outputs: Tensor, targets: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The mean Hessian over a grid of targets for one datum."""
    found = [_dense_hessian(likelihood, outputs, target, None) for target in targets]
    return sum(weight * each for weight, each in zip(weights, found, strict=True))  # type: ignore[return-value]


def test_expected_hessians_of_discrete_targets_by_enumeration() -> None:
    likelihood, outputs, _, _ = CASES["ordinal"]
    targets = [torch.tensor([label]) for label in range(4)]
    weights = list(likelihood.predict(outputs[:1]).probs[0])
    expected = _expectation(likelihood, outputs[:1], targets, weights)
    torch.testing.assert_close(likelihood.hessian(outputs[:1])[0], expected, rtol=1e-12, atol=1e-12)

    counts = CASES["negative-binomial"][0]
    targets = [torch.tensor([float(count)], dtype=torch.float64) for count in range(300)]
    weights = [counts.log_prob(outputs[0, :1], target).exp()[0] for target in targets]
    expected = _expectation(counts, outputs[0, :1], targets, weights)
    torch.testing.assert_close(counts.hessian(outputs[0, :1])[0], expected, rtol=1e-10, atol=1e-10)


def test_expected_hessian_of_student_t_by_quadrature() -> None:
    likelihood, outputs, _, _ = CASES["student-t"]
    nodes, weights = np.polynomial.legendre.leggauss(400)
    levels = torch.from_numpy((nodes + 1) / 2)  # y = F⁻¹(u): the expectation is an integral over (0, 1)
    places = torch.from_numpy(stats.t.ppf(levels.numpy(), 4.5))
    targets = outputs[:1, 0] + outputs[:1, 1].exp() * places
    expected = _expectation(likelihood, outputs[:1], list(targets[:, None]), list(torch.from_numpy(weights / 2)))
    torch.testing.assert_close(likelihood.hessian(outputs[:1])[0], expected, rtol=1e-6, atol=1e-6)


def _outer(likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The Fisher information of one datum, the mean of g gᵀ over a grid of its targets."""
    gradient = likelihood.gradient(outputs.expand(len(targets), -1), targets)
    return torch.einsum("n,ni,nj->ij", weights, gradient, gradient)


def test_fisher_information_of_quantiles_by_quadrature() -> None:
    likelihood, outputs, _, _ = CASES["quantile"]
    one = outputs[:1, [0, 2]]
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.laguerre.laggauss(60))
    scale = one[0, 1].exp()  # both halves are exponential: exact for polynomials
    above, below = one[0, 0] + scale * nodes / 0.8, one[0, 0] - scale * nodes / 0.2
    expected = _outer(likelihood, one, torch.cat([above, below]), torch.cat([0.2 * weights, 0.8 * weights]))
    torch.testing.assert_close(likelihood.hessian(one)[0], expected, rtol=1e-10, atol=1e-10)


def test_fisher_information_of_shares_by_quadrature() -> None:
    likelihood, alpha = Dirichlet(), (3.5, 2.2)
    outputs = torch.tensor([alpha], dtype=torch.float64).log()
    nodes, weights = np.polynomial.legendre.leggauss(400)
    share = torch.from_numpy((nodes + 1) / 2)
    density = torch.from_numpy(stats.beta.pdf(share.numpy(), *alpha) * weights / 2)
    expected = _outer(likelihood, outputs, torch.stack([share, 1 - share], 1), density)
    torch.testing.assert_close(likelihood.hessian(outputs)[0], expected, rtol=1e-6, atol=1e-6)
    three = CASES["dirichlet"]
    log_p = likelihood.log_prob(three[1], three[2])
    scipy_log_p = [stats.dirichlet.logpdf(y, f.exp()) for f, y in zip(three[1], three[2], strict=True)]
    torch.testing.assert_close(log_p, torch.tensor(scipy_log_p, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_mixture_density_hessian_is_that_of_target_and_component() -> None:
    """At least the Fisher information of the target alone, and equal to it where the components do not overlap."""
    likelihood = MixtureDensity(2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(90)
    for distance, equal in ((50.0, True), (1.0, False)):
        outputs = torch.tensor([[0.3, -0.2, -distance, distance, 0.1, -0.4]], dtype=torch.float64)
        shares = outputs[0, :2].softmax(-1)
        fisher = torch.zeros(6, 6, dtype=torch.float64)
        for k in range(2):
            for node, weight in zip(nodes, weights / weights.sum(), strict=True):
                target = (outputs[0, 2 + k] + node * outputs[0, 4 + k].exp()).reshape(1)
                gradient = likelihood.gradient(outputs, target)[0]
                fisher += shares[k] * weight * torch.outer(gradient, gradient)
        excess = torch.linalg.eigvalsh(likelihood.hessian(outputs)[0] - fisher)
        assert excess.min() > -1e-8
        assert (excess.max() < 1e-8) == equal


def test_root_times_its_transpose_is_the_hessian(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    for given in (targets, None):
        root = likelihood.hessian_root(outputs, given, hyper)
        assert root.shape[1:] == likelihood.canonical(outputs).shape
        product = torch.einsum("r...c,r...d->...cd", root, root)
        torch.testing.assert_close(product, likelihood.hessian(outputs, given, hyper), rtol=1e-12, atol=1e-14)


def test_expected_outer_gradient_over_all_labels_is_the_hessian() -> None:
    """The Fisher identity, by exact enumeration of the labels."""
    categorical, logits, _, _ = CASES["categorical"]
    probs = logits.softmax(-1)
    outer = torch.zeros(4, 5, 5, dtype=torch.float64)
    for label in range(5):
        gradient = categorical.gradient(logits, torch.full((4,), label))
        outer += probs[:, label, None, None] * gradient[:, :, None] * gradient[:, None, :]
    torch.testing.assert_close(outer, categorical.hessian(logits), rtol=1e-12, atol=1e-14)


def test_fisher_columns_average_to_the_hessian(case: Any) -> None:
    """Σ_s g gᵀ over 40,000 draws within 5 standard errors (estimated from the draws) of the Hessian, entry by entry."""
    likelihood, outputs, targets, hyper = case
    num = 40_000
    flat = outputs.ndim == 1
    one, label = (outputs[:1], targets[:1])
    many = one.expand(num, *one.shape[1:]) if not flat else one.expand(num)
    columns = likelihood.fisher_columns(
        many, 1, label.expand(num, *label.shape[1:]), hyper, generator=torch.Generator().manual_seed(3)
    )[0]
    outer = torch.einsum("...c,...d->...cd", columns, columns)
    error = outer.std(0) / math.sqrt(num)
    expected = likelihood.hessian(one, label, hyper)[0]
    assert ((outer.mean(0) - expected).abs() <= 5 * error + 1e-12).all()


def test_several_fisher_columns_share_the_weight(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    single = torch.Generator().manual_seed(5)
    draws = [likelihood.fisher_columns(outputs, 1, targets, hyper, generator=single)[0] for _ in range(3)]
    columns = likelihood.fisher_columns(outputs, 3, targets, hyper, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(columns, torch.stack(draws) / math.sqrt(3), rtol=1e-14, atol=1e-14)
    with pytest.raises(InputError, match="at least 1, got 0"):
        likelihood.fisher_columns(outputs, 0)


def test_samples_pass_the_check_and_repeat(case: Any) -> None:
    likelihood, outputs, _, hyper = case
    first, second = (likelihood.sample(outputs, hyper, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    likelihood.check(outputs, first)
    assert torch.equal(first, second)
    other = likelihood.sample(outputs, hyper, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(first, other)


def test_float32_stays_float32(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    outputs = outputs.float()
    generator = torch.Generator().manual_seed(0)
    results = [
        likelihood.log_prob(outputs, targets, hyper),
        likelihood.gradient(outputs, targets, hyper),
        likelihood.hessian(outputs, targets, hyper),
        likelihood.hessian_root(outputs, targets, hyper),
        likelihood.fisher_columns(outputs, 2, targets, hyper, generator=generator),
        likelihood.temper(outputs, 1.0)[0] if hyper is None else outputs,
        likelihood.predict(outputs, hyper).log_prob(likelihood.sample(outputs, hyper, generator=generator)),
    ]
    assert [result.dtype for result in results] == [torch.float32] * len(results)


def test_everything_vmaps_over_a_leading_axis(case: Any) -> None:
    likelihood, outputs, targets, hyper = case
    stacked = torch.stack([outputs, -outputs, 0.5 * outputs])
    for method in (likelihood.log_prob, likelihood.gradient, likelihood.hessian, likelihood.hessian_root):
        together = torch.func.vmap(lambda one, method=method: method(one, targets, hyper))(stacked)
        apart = torch.stack([method(one, targets, hyper) for one in stacked])
        torch.testing.assert_close(together, apart, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logits", [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [1e4, 1e4, 1e4]])
def test_extreme_logits_stay_finite(logits: list[float], dtype: torch.dtype) -> None:
    outputs = torch.tensor([logits], dtype=dtype, requires_grad=True)
    for likelihood, targets in ((Categorical(), torch.tensor([1])), (Bernoulli(), torch.tensor([[1, 0, 1]]))):
        value = likelihood.log_prob(outputs, targets)
        (gradient,) = torch.autograd.grad(value.sum(), outputs)
        results = [value, gradient, likelihood.gradient(outputs, targets), likelihood.hessian(outputs)]
        results += [likelihood.hessian_root(outputs), likelihood.predict(outputs).log_probs]
        assert all(bool(result.isfinite().all()) for result in results)
    assert Categorical().log_prob(torch.tensor([[1e4, -1e4]], dtype=dtype), torch.tensor([1])).item() == -2e4
    assert Bernoulli().log_prob(torch.tensor([-1e4], dtype=dtype), torch.tensor([1])).item() == -1e4


def test_hessian_of_an_almost_certain_class_keeps_its_digits() -> None:
    """p(1 − p) with 1 − p = 1e-9 is zero in float32 by subtraction; here it has full relative precision."""
    logits = torch.tensor([[math.log(1e9), 0.0]])
    expected = Categorical().hessian(logits.double())
    torch.testing.assert_close(Categorical().hessian(logits).double(), expected, rtol=1e-5, atol=0)
    root = Categorical().hessian_root(logits)
    product = torch.einsum("rbc,rbd->bcd", root, root)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=0)


def test_noise_of_large_outputs_is_not_rounded_away() -> None:
    """Fisher columns come from the noise itself: at outputs of 1e8, float32 cannot hold outputs + noise."""
    generator = torch.Generator().manual_seed(0)
    for likelihood, outputs in (
        (Gaussian(noise=0.5), torch.full((4000, 1), 1e8)),
        (HeteroscedasticGaussian(), torch.tensor([[1e8, 2 * math.log(0.5)]]).expand(4000, 2)),
    ):
        columns = likelihood.fisher_columns(outputs, 1, generator=generator)[0]
        # The variance of a squared normal is 2, so the mean of 4,000 has a standard error of 4·√(2/4000).
        assert abs(columns[:, 0].square().mean().item() - 4.0) < 5 * 4 * math.sqrt(2 / 4000)


def test_noise_is_differentiable() -> None:
    outputs, targets = _normal(5, 2), _normal(5, 2) + 1
    log_noise = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
    value = Gaussian().log_prob(outputs, targets, {"log_noise": log_noise}).sum()
    (gradient,) = torch.autograd.grad(value, log_noise)
    residuals = (targets - outputs) / math.exp(-0.4)
    torch.testing.assert_close(gradient, residuals.square().sum() - residuals.numel(), rtol=1e-12, atol=0)
