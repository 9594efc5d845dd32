"""Language models whose own loss shifts the labels: logits are compared with the next token."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn
from torch.nn import functional

import dubito
from dubito import MAP, Laplace, Training, likelihoods, select
from dubito.beliefs.likelihoods import Categorical

WORDS = 7


class Model(nn.Module):
    """A model with labels and a loss of its own, as Hugging Face has them; it knows the next word from the last."""

    config = SimpleNamespace(vocab_size=WORDS)

    def __init__(self, shifts: bool, trained: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS)
        self.shifts = shifts
        if not trained:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits, loss = self.head(self.words(input_ids)), None
        if labels is not None:
            used = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
            loss = functional.cross_entropy(used[0].flatten(0, 1), used[1].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class ToyForCausalLM(Model):
    pass


def tokens() -> Tensor:
    first = torch.arange(20) % WORDS
    return (first[:, None] + torch.arange(5)) % WORDS


def fitted(model: nn.Module, data: dict[str, Tensor], likelihood="categorical", epochs: int = 1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MAP().fit(model, data, likelihood=likelihood, training=Training(epochs=epochs, lr=0.05))


class TestAlignment:
    def test_values(self) -> None:
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, (3, 4), generator=generator)
        targets[0, 2] = -100
        one, plain = Categorical(next_token=True), Categorical()
        moved = functional.pad(targets[:, 1:], (0, 1), value=-100)
        assert torch.equal(one.aligned(targets), moved)
        for name in ("log_prob", "gradient", "hessian", "hessian_root"):
            assert torch.equal(getattr(one, name)(outputs, targets), getattr(plain, name)(outputs, moved)), name
        assert not bool(one.observed(targets)[:, -1].any())

    def test_only_tokens_have_a_next_one(self) -> None:
        with pytest.raises(InputError, match="needs labels"):
            Categorical(next_token=True).log_prob(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))

    def test_text_form(self) -> None:
        assert repr(Categorical()) == "likelihoods.Categorical()"
        assert dubito.parse("likelihoods.Categorical(next_token=True)") == Categorical(next_token=True)


class TestRecognition:
    def test_by_its_own_loss(self) -> None:
        data = {"input_ids": tokens(), "labels": tokens()}
        model = Model(shifts=True)
        with pytest.warns(UserWarning, match="causal language model"):
            posterior = MAP().fit(model, data, training=Training(epochs=60, lr=0.05))
        assert posterior.likelihood == Categorical(next_token=True)
        own = posterior.model(tokens(), labels=tokens()).loss.item()
        assert own < 0.3 * math.log(WORDS)
        assert dubito.evaluate(posterior, data).scores["nll"] == pytest.approx(own, rel=1e-4)
        assert model.training

    def test_other_models_compare_the_same_position(self) -> None:
        data = {"input_ids": tokens(), "labels": tokens()}
        assert MAP().fit(Model(shifts=False), data, training=Training(epochs=1)).likelihood == Categorical()
        plain = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
        assert MAP().fit(plain, (tokens(), tokens()), training=Training(epochs=1)).likelihood == Categorical()

    def test_by_its_class_where_losses_agree(self) -> None:
        data = {"input_ids": tokens(), "labels": tokens()}
        assert fitted(ToyForCausalLM(shifts=True, trained=False), data).likelihood.next_token is True
        assert fitted(Model(shifts=True, trained=False), data).likelihood.next_token == "auto"

    def test_labels_that_are_shifted_already_stay(self) -> None:
        data = {"input_ids": tokens()[:, :-1], "labels": tokens()[:, 1:]}
        assert MAP().fit(Model(shifts=True), data, training=Training(epochs=1)).likelihood == Categorical()

    @pytest.mark.parametrize("said", [True, False])
    def test_the_users_word_counts(self, said: bool) -> None:
        data = {"input_ids": tokens(), "labels": tokens()}
        one = likelihoods.Categorical(next_token=said)
        assert MAP().fit(Model(not said), data, likelihood=one, training=Training(epochs=1)).likelihood == one


def test_curvature_ignores_the_last_position() -> None:
    model, data = Model(shifts=True), {"input_ids": tokens(), "labels": tokens()}
    recipe = Laplace(structure="full", weights=select.layers("head"), prior_precision=1.0)
    shifted = recipe.fit(model, data, likelihood=Categorical(next_token=True))
    moved = functional.pad(tokens()[:, 1:], (0, 1), value=-100)
    by_hand = recipe.fit(model, {"input_ids": tokens(), "labels": moved}, likelihood=Categorical(next_token=False))
    torch.testing.assert_close(shifted.log_evidence(), by_hand.log_evidence())
