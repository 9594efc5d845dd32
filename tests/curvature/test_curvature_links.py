"""Links from Gaussian outputs to predictions against quadrature, exact identities and their own definitions."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from torch import Tensor, nn

from dubito.core import limits, params
from dubito.core.errors import InputError
from dubito.curvature import links
from dubito.curvature.links import Noise
from dubito.fitting.functions import weight_predictor
from oracles import close, normal


def noise(num_samples: int, seed: int = 0) -> Noise:
    return Noise(num_samples, torch.Generator().manual_seed(seed))


def covariances(*lead: int, size: int) -> Tensor:
    root = normal(*lead, size, size)
    return root @ root.mT


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------ probit


def test_probit_is_the_sigmoid_of_a_gaussian_to_within_its_known_error() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    nodes, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    for mean in (-3.0, -0.5, 0.0, 2.0):
        for variance in (0.0, 0.5, 4.0, 25.0):
            exact = (torch.sigmoid(mean + variance**0.5 * nodes) * weights).sum()
            probit = links.probit(torch.tensor(mean), torch.tensor(variance)).sigmoid()
            assert abs(float(exact - probit)) < 0.02


def test_probit_keeps_logits_that_are_certain_also_where_rounding_made_the_variance_negative() -> None:
    logits = normal(3)
    close(links.probit(logits, torch.tensor([0.0, -1e-9, -1.0], dtype=torch.float64)), logits)


# ------------------------------------------------------------------ bridge


def dirichlet_logits(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the softmax-basis Laplace approximation of a Dirichlet (MacKay 1998)."""
    size = alpha.shape[-1]
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    inverse = 1 / alpha
    average = inverse.mean(-1)
    covariance = torch.diag_embed(inverse) - (inverse[..., :, None] + inverse[..., None, :]) / size
    return mean, covariance + average[..., None, None] / size


@pytest.mark.parametrize("size", [2, 3, 10])
def test_the_bridge_leads_back_to_the_dirichlet_it_came_from(size: int) -> None:
    alpha = 0.2 + 5 * torch.rand(4, size, dtype=torch.float64)
    expected = (alpha / alpha.sum(-1, keepdim=True)).log()
    close(links.bridge(*dirichlet_logits(alpha)), expected)
    # positions are but more examples
    mean, covariance = dirichlet_logits(alpha)
    close(links.bridge(mean.reshape(2, 2, size), covariance.reshape(2, 2, size, size)), expected.reshape(2, 2, size))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_bridge_is_its_definition(normalize: bool) -> None:
    mean, covariance = normal(5, 4), covariances(5, size=4)
    for f, v, found in zip(mean, covariance, links.bridge(mean, covariance, normalize), strict=True):
        f = f - v.sum(1) * f.sum() / v.sum()
        v = (v - torch.outer(v.sum(1), v.sum(0)) / v.sum()).diagonal()
        if normalize:
            scale = v.mean() / (4 / 2) ** 0.5
            f, v = f / scale.sqrt(), v / scale
        alpha = (1 - 2 / 4 + f.exp() / 16 * (-f).exp().sum()) / v
        close(found.exp(), alpha / alpha.sum())


def test_the_bridge_stays_finite() -> None:
    for dtype in (torch.float32, torch.float64):
        mean = torch.tensor([[300.0, -300.0, 0.0], [1.0, 2.0, 3.0]], dtype=dtype)
        for covariance in (torch.zeros(2, 3, 3, dtype=dtype), torch.eye(3, dtype=dtype).expand(2, 3, 3)):
            for normalize in (False, True):
                found = links.bridge(mean, covariance, normalize)
                assert bool(found.isfinite().all())
                close(found.exp().sum(-1), torch.ones(2, dtype=dtype), 1e-5)


# ------------------------------------------------------------------ sampled outputs


def test_draws_have_the_mean_and_the_covariance() -> None:
    mean, covariance = normal(2, 3), covariances(2, size=3)
    covariance[1] = torch.outer(covariance[1, 0], covariance[1, 0])  # singular
    draws = links.draw(mean, covariance, noise(200_000))
    close(draws.mean(0), mean, 0.03)
    moved = draws - mean
    close(torch.einsum("sbi,sbj->bij", moved, moved) / len(draws), covariance, 0.05)


def test_every_example_shares_the_noise_so_that_batches_do_not_matter() -> None:
    shared = noise(7)
    mean, covariance = normal(5, 3), covariances(5, size=3)
    whole = links.draw(mean, covariance, shared)
    for part in (slice(0, 2), slice(2, 5)):
        close(links.draw(mean[part], covariance[part], shared), whole[:, part])
    close(links.draw(mean, covariance, noise(7)), whole)
    assert shared.like(normal(2, 4)).shape == (7, 1, 4)  # longer sequences have draws of their own
    close(links.draw(mean, covariance, shared), whole)


LAYOUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "classes": (Categorical(), (5, 3)),
    "sequence": (Categorical(), (5, 2, 3)),
    "map": (Categorical(), (5, 3, 2, 2)),
    "label": (Bernoulli(), (5,)),
    "labels": (Bernoulli(), (5, 4)),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@pytest.mark.parametrize("link", ["probit", "mc"])
def test_certain_outputs_give_the_predictions_of_the_network(layout: str, link: links.LinkName) -> None:
    likelihood, shape = LAYOUTS[layout]
    outputs = normal(*shape)
    canonical = likelihood.canonical(outputs)
    expected = likelihood.predict(outputs)
    how = links.find_link(link, likelihood)
    nothing = torch.diag_embed(torch.zeros_like(canonical)) if how.reads_covariance else torch.zeros_like(canonical)
    found = links.predict(likelihood, outputs, nothing, noise(3), how)
    close(found.probs, expected.probs)
    close(found.entropy, expected.entropy)
    close(found.epistemic, torch.zeros_like(found.epistemic))


@every_layout
def test_probit_prediction(layout: str) -> None:
    likelihood, shape = LAYOUTS[layout]
    outputs = normal(*shape)
    canonical = likelihood.canonical(outputs)
    variance = torch.rand_like(canonical)
    found = links.predict(likelihood, outputs, variance, noise(50))
    logits = likelihood.restore(canonical / torch.sqrt(1 + torch.pi / 8 * variance), outputs)
    close(found.probs, likelihood.predict(logits).probs)
    close(found.entropy, found.aleatoric + found.epistemic)
    samples = canonical + variance.sqrt() * noise(50).like(canonical)
    mixture = likelihood.predict_samples(likelihood.restore(samples, outputs))
    close(found.aleatoric, mixture.aleatoric)


@every_layout
def test_sampled_prediction_uses_the_covariance_at_each_position(layout: str) -> None:
    likelihood, shape = LAYOUTS[layout]
    outputs = normal(*shape)
    canonical = likelihood.canonical(outputs)
    covariance = covariances(*canonical.shape[:-1], size=canonical.shape[-1])
    found = links.predict(likelihood, outputs, covariance, noise(4000), links.LINKS["mc"])
    draws = torch.distributions.MultivariateNormal(canonical, covariance).sample((4000,))
    expected = likelihood.predict_samples(likelihood.restore(draws, outputs), keep_samples=False)
    close(found.probs, expected.probs, 0.04)
    close(found.epistemic, expected.epistemic, 0.04)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_centred_logits_differ_as_much_as_their_covariance_says(classes: int) -> None:
    """The ratio gives the variance of a logit against the mean of the others, and of draws on average over pairs."""
    full = covariances(4, size=classes)
    centre = torch.eye(classes, dtype=full.dtype) - 1 / classes
    covariance = centre @ full @ centre
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    ratio, apart = links.against_others(classes, centred=True), ~torch.eye(classes, dtype=torch.bool)
    against = torch.eye(classes, dtype=full.dtype) - apart.to(full) / (classes - 1)
    close((against @ covariance @ against.mT).diagonal(dim1=-2, dim2=-1), ratio**2 * variance, 1e-10)
    sums = variance[..., :, None] + variance[..., None, :]
    close((ratio * sums)[:, apart].mean(-1), (sums - 2 * covariance)[:, apart].mean(-1), 1e-10)
    assert links.against_others(classes, centred=False) == 1.0


@pytest.mark.parametrize(("classes", "most"), [(2, 0.01), (3, 0.05), (10, 0.03)])
def test_centred_variances_give_nearly_the_prediction_of_the_covariance(classes: int, most: float) -> None:
    full, mean = covariances(20, size=classes) / classes, normal(20, classes)
    centre = torch.eye(classes, dtype=full.dtype) - 1 / classes
    covariance = centre @ full @ centre
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    joint = links.predict(Categorical(), mean, covariance, noise(20_000), links.LINKS["mc"])
    near, far = (
        links.predict(Categorical(), mean, variance, noise(20_000), centred=centred) for centred in (True, False)
    )
    for name, bound in (("probs", most), ("epistemic", 0.05), ("aleatoric", 0.05)):
        errors = [float((getattr(each, name) - getattr(joint, name)).abs().mean()) for each in (near, far)]
        assert errors[0] < bound
        assert errors[0] < errors[1] or classes == 10


@pytest.mark.parametrize("layout", ["classes", "sequence", "map"])
@pytest.mark.parametrize("link", ["bridge", "bridge-norm"])
def test_bridge_prediction(layout: str, link: str) -> None:
    likelihood, shape = LAYOUTS[layout]
    outputs = normal(*shape)
    canonical = likelihood.canonical(outputs)
    covariance = covariances(*canonical.shape[:-1], size=canonical.shape[-1])
    found = links.predict(likelihood, outputs, covariance, noise(9), links.LINKS[link])
    close(found.probs, links.bridge(canonical, covariance, link == "bridge-norm").exp())


@every_layout
def test_parts_of_a_batch_are_put_together(layout: str) -> None:
    likelihood, shape = LAYOUTS[layout]
    outputs = normal(*shape)
    canonical = likelihood.canonical(outputs)
    variance, covariance = torch.rand_like(canonical), covariances(*canonical.shape[:-1], size=canonical.shape[-1])
    whole = links.predict(likelihood, outputs, variance, noise(5))
    sampled = links.predict(likelihood, outputs, covariance, noise(5), links.LINKS["mc"])
    with limits.using(chunk=4):
        close(links.predict(likelihood, outputs, variance, noise(5)).entropy, whole.entropy)
        close(links.predict(likelihood, outputs, covariance, noise(5), links.LINKS["mc"]).probs, sampled.probs)


@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_regression_is_exact(shape: tuple[int, ...]) -> None:
    likelihood = Gaussian(noise=0.5)
    outputs = normal(*shape)
    variance = torch.rand_like(likelihood.canonical(outputs))
    found = links.predict(likelihood, outputs, variance, noise(1))
    close(found.mean.reshape(-1), outputs.reshape(-1))
    close(found.epistemic.reshape(-1), variance.reshape(-1))
    close(found.stddev.square(), found.epistemic + 0.25)


def test_the_table_of_links_and_the_type_of_the_argument_agree() -> None:
    assert set(links.LINKS) == set(get_args(links.LinkName))
    others = " or ".join(repr(name) for name, link in links.LINKS.items() if not link.softmax_only)
    for name, link in links.LINKS.items():
        assert links.find_link(name, Categorical()) is link
        if link.softmax_only:
            with pytest.raises(InputError, match=f"use {others}"):
                links.find_link(name, Bernoulli())


# The largest error of a class probability where the logits are those of a Dirichlet, for which the bridge was made.
ERRORS = {"probit": 0.015, "mc": 0.002, "bridge": 0.02, "bridge-norm": 0.06}


@pytest.mark.slow
def test_every_link_is_near_the_mean_over_many_samples() -> None:
    assert ERRORS.keys() == links.LINKS.keys()  # a new link states its error here
    mean, covariance = dirichlet_logits(1 + 2 * torch.rand(8, 4, dtype=torch.float64))
    expected = links.draw(mean, covariance, noise(40_000, seed=1)).softmax(-1).mean(0)
    for name, link in links.LINKS.items():
        spread = covariance if link.reads_covariance else covariance.diagonal(dim1=-2, dim2=-1)
        found = links.predict(Categorical(), mean, spread, noise(40_000), link)
        assert float((found.probs - expected).abs().max()) < ERRORS[name], name


def test_a_link_is_one_object() -> None:
    outputs, variance = normal(4, 3), torch.rand(4, 3, dtype=torch.float64)
    hotter = links.Link(lambda likelihood, mean, spread, outputs: (mean / 2).log_softmax(-1), reads_covariance=False)
    found = links.predict(Categorical(), outputs, variance, noise(5), hotter)
    close(found.probs, (outputs / 2).softmax(-1))
    close(found.entropy, links.predict(Categorical(), outputs, variance, noise(5)).entropy)


def test_which_likelihoods_have_classes_and_a_null_direction() -> None:
    kinds = (Categorical(), Bernoulli(), Gaussian(noise=1.0), HeteroscedasticGaussian())
    assert [links.is_classification(one) for one in kinds] == [True, True, False, False]
    assert [links.has_null_direction(one) for one in kinds] == [True, False, False, False]


# ------------------------------------------------------------------ weight sampling


def test_weight_sampling_is_the_mixture_of_networks() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double().train()
    x, base = normal(6, 3), params.of(model)
    samples = {name: value + 0.3 * normal(5, *value.shape) for name, value in base.items()}
    statistics = {"1.running_mean": normal(5, 4), "1.running_var": torch.rand(5, 4, dtype=torch.float64) + 0.5}
    found = weight_predictor(model.eval(), Categorical(), samples, buffers=statistics, temperature=2.0)(x)
    each = []
    for s in range(5):
        with torch.no_grad():
            state = {**{n: v[s] for n, v in samples.items()}, **{n: v[s] for n, v in statistics.items()}}
            each.append(torch.func.functional_call(model, state, x) / 2.0)
    close(found.probs, torch.stack(each).softmax(-1).mean(0))
