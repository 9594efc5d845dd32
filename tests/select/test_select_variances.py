"""Weight variances from posteriors that are trained, not from curvature."""

from __future__ import annotations

import pytest
import torch
from subnetwork_cases import case

from dubito import SWAG, Laplace, Training, Variational, select
from dubito.fitting.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", [SWAG(burn_in=0.0), Variational()], ids=["swag", "variational"])
def test_the_rule_of_the_paper_takes_the_variances_of_any_posterior(recipe: Recipe) -> None:
    one = case("categorical")
    posterior = recipe.fit(one.model, one.data, training=Training(epochs=3, batch_size=8), progress=False)
    _, variance = posterior.marginals()
    largest = one.weights().ravel(variance).argsort(descending=True)[:7].sort().values
    chosen = select.largest_variance(7, of=posterior).resolve(one.model, one.data)
    where = one.weights().ravel({name: mask.double() for name, mask in chosen.masks().items()})
    torch.testing.assert_close(where.nonzero().squeeze(1), largest)


def test_a_recipe_is_trained_on_batches_of_its_own() -> None:
    one = case("categorical")
    generator = torch.Generator().manual_seed(3)
    expected = SWAG(burn_in=0.0).fit(one.model, one.data, generator=generator, progress=False)
    rule = select.largest_variance(7, of=SWAG(burn_in=0.0))
    chosen = rule.resolve(one.model, one.data, generator=torch.Generator().manual_seed(3))
    assert chosen == select.largest_variance(7, of=expected).resolve(one.model, one.data)


def test_output_variance_with_swag_variances() -> None:
    one = case("categorical")
    rule = select.subnetwork(9, variance=SWAG(burn_in=0.0))
    posterior = Laplace(structure="full", weights=rule, prior_precision=1.0).fit(one.model, one.data, progress=False)
    assert posterior.selection.num_weights == 9
