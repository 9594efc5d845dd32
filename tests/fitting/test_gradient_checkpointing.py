"""Networks that call parts of themselves again in the backward pass: right, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dubito import MAP, BatchEnsemble, Laplace, MCDropout, Rank1, Training, Variational
from dubito.core.errors import UnsupportedError
from dubito.core.once import warn_once

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


class Network(nn.Module):
    def __init__(self, checkpointed: bool, reentrant: bool = False, flag: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = flag  # as in Hugging Face's models
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def part(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.second(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.checkpointed or (self.gradient_checkpointing and self.training):
            return self.last(checkpoint(self.part, hidden, use_reentrant=self.reentrant))
        return self.last(self.part(hidden))


def fitted(recipe: Any, model: nn.Module) -> Tensor:
    settings: dict[str, Any] = {} if isinstance(recipe, Laplace) else {"training": Training(epochs=3, lr=0.05)}
    generator = torch.Generator().manual_seed(0)
    return recipe.fit(model, (X, Y), progress=False, generator=generator, **settings).predict(X).probs


@pytest.mark.parametrize("recipe", [MAP(), Laplace(), Variational(estimator="flipout")], ids=repr)
def test_the_same_posterior_as_without(recipe: Any) -> None:
    torch.testing.assert_close(fitted(recipe, Network(True)), fitted(recipe, Network(False)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [Rank1(components=2), BatchEnsemble(), MCDropout(), Variational(), Variational(estimator="weight")],
    ids=repr,
)
def test_recipes_that_change_the_network_for_one_pass_refuse_it(recipe: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"gradient checkpointing.*switch it off"):
        fitted(recipe, Network(True))


@pytest.mark.parametrize("recipe", [Rank1(components=2), BatchEnsemble(), MCDropout(), Variational()], ids=repr)
def test_they_switch_it_off_where_the_model_has_a_flag_for_it(recipe: Any) -> None:
    model = Network(False, flag=True)
    warn_once.forget()
    with pytest.warns(UserWarning, match="Gradient checkpointing is switched off in the copy"):
        found = fitted(recipe, model)
    torch.testing.assert_close(found, fitted(recipe, Network(False)), rtol=0, atol=0)
    assert model.gradient_checkpointing


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused_by_what_trains() -> None:
    with pytest.raises(UnsupportedError, match="use use_reentrant=False"):
        fitted(MAP(), Network(True, reentrant=True))
