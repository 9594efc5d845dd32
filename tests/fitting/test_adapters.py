"""Adapters on a frozen base: chosen by class, beside a base that is neither copied nor saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, SGMCMC, SWAG, Ensemble, Laplace, Rank1, Snapshot, Training, Variational, select
from dubito.core.errors import FileFormatError, InputError
from dubito.core.params import Frozen
from dubito.networks.adapters import adapter_names

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class BaseTunerLayer:
    """Stands for the class by which peft's adapters are recognized."""

    adapter_layer_names: tuple[str, ...] = ()


BaseTunerLayer.__module__ = "peft.tuners.tuners_utils"


class Adapted(nn.Module, BaseTunerLayer):
    adapter_layer_names = ("down", "up")

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.down = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up["default"](self.down["default"](x))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(nn.Linear(4, 32)), nn.Tanh(), Adapted(nn.Linear(32, 2)))


CHOSEN = select.adapters()
RECIPES: list[Any] = [
    Laplace(weights=CHOSEN),
    Laplace(weights=CHOSEN, structure="full"),
    Variational(weights=CHOSEN),
    Variational(weights=CHOSEN, optimizer="natural"),
    SGMCMC("sghmc", weights=CHOSEN, num_samples=3, burn_in=3, thinning=2),
    SWAG(weights=CHOSEN),
    Ensemble(2),
    Snapshot(),
    Rank1(components=2, weights=CHOSEN),
    MAP(),
]


def fitted(recipe: Any, model: nn.Module) -> Any:
    own = {} if isinstance(recipe, Laplace | SGMCMC) else {"training": Training(epochs=6, batch_size=12)}
    return recipe.fit(model, (X, Y), progress=False, generator=torch.Generator().manual_seed(0), **own)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_the_base_is_shared_and_left_out_of_files(recipe: Any, tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    posterior = fitted(recipe, model)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0)
        own = posterior.model.get_parameter(name)
        assert (own.data_ptr() == value.data_ptr()) == (not value.requires_grad)
        assert isinstance(own, Frozen) == (not value.requires_grad)
    path = tmp_path / "adapters.safetensors"
    posterior.save(path)
    with dubito.core.io.reading(path):
        saved = dubito.core.io.load(path, "posterior")
    assert all("base_layer" not in name for name in saved["params"])
    again = dubito.load(path, network())
    torch.testing.assert_close(again.predict(X).probs, posterior.predict(X).probs)
    with pytest.raises(FileFormatError, match="are not those that they were fitted on"):
        dubito.load(path, network(seed=1))


def test_uses_that_change_weights_do_not_touch_the_base() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    posterior = fitted(Laplace(structure="diag"), model)
    dubito.compress(posterior, rule=dubito.compression.rules.Magnitude(0.5), data=(X, Y))
    copied = copy.deepcopy(posterior.model)
    with torch.no_grad():
        for value in copied.parameters():
            value.zero_()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_the_same_posterior_as_by_names() -> None:
    by_name = select.layers(("down", "up"))
    found, expected = (fitted(Laplace(weights=rule), network()).predict(X).probs for rule in (CHOSEN, by_name))
    torch.testing.assert_close(found, expected)
    assert adapter_names(network()) == [name for name, v in network().named_parameters() if v.requires_grad]


def test_a_network_without_adapters() -> None:
    with pytest.raises(InputError, match="has no trainable adapters"):
        fitted(Laplace(weights=CHOSEN), nn.Linear(4, 2))
    posterior = fitted(MAP(), nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2)))
    assert not any(isinstance(value, Frozen) for value in posterior.model.parameters())


def test_rank1_factors_of_some_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    posterior = fitted(Rank1(components=2, weights=select.last_layer()), model)
    assert [site.name for site in posterior.layout.sites] == ["2"]
    with pytest.raises(InputError, match="change whole layers"):
        fitted(Rank1(components=2, weights=select.largest_magnitude(5)), model)


@pytest.mark.slow
def test_a_file_as_small_as_the_adapters(tmp_path: Path) -> None:
    """Of the wide factors some eigenpairs and the diagonal are kept; 16 of 40 examples are enough for all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator) @ torch.randn(2, 96, generator=generator)  # inputs of rank two
    data, sizes, found = (x, (x[:, 0] > 0).long()), {}, {}
    for rank in ("auto", None, 1):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(nn.Linear(96, 3)))
        recipe = Laplace(weights=CHOSEN, prior_precision=1.0, factor_rank=rank)
        posterior = recipe.fit(model, data, progress=False)
        posterior.save(tmp_path / "adapters.safetensors")
        sizes[rank] = (tmp_path / "adapters.safetensors").stat().st_size
        found[rank] = posterior.functional(x)[1]
        again = dubito.load(tmp_path / "adapters.safetensors", model)
        assert again.digest() == posterior.digest()
        torch.testing.assert_close(again.functional(x)[1], found[rank])
        updated = again.update(data, progress=False)
        assert updated.sums.keys() == posterior.sums.keys()
        assert all(updated.sums[name].keys() == part.keys() for name, part in posterior.sums.items())
    torch.testing.assert_close(found["auto"], found[None], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[1], found[None], rtol=1e-2)
    assert sizes[None] > 8 * 96**2
    assert sizes["auto"] < sizes[None] - 8 * 96**2 + 4 * 96 * 3 + 1000
