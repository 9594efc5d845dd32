"""`Ensemble` over any recipe: starts, orders, what each member carries, and what one member is."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from ensemble_cases import TRAINING, classes, dense, normalized, numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, SWAG, Ensemble, Laplace, MCDropout, Snapshot, Training, Variational, priors, select
from dubito.core import params
from dubito.core.subsets import drawn_rows, resampled
from dubito.methods.ensembles.posterior import mixture
from oracles import seeded_layers, weights_of

pytestmark = pytest.mark.slow


def fit(recipe: Any, data: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"training": TRAINING, "generator": torch.Generator().manual_seed(3), **options}
    return recipe.fit(model or dense(), data or classes(), **options)


class TestOneMember:
    """An ensemble of one is the network itself, bit by bit."""

    @pytest.mark.parametrize("recipe", [MAP(), Variational(), SWAG(rank=2), MCDropout(0.2)], ids=repr)
    @pytest.mark.parametrize("start", ["model", "fresh"])
    def test_is_what_its_recipe_finds(self, recipe: Any, start: Any) -> None:
        alone = fit(recipe.replace(start=start), model=normalized())
        one = fit(Ensemble(members=1, recipe=recipe, start=start), model=normalized())
        assert torch.equal(weights_of(one), weights_of(alone))
        assert one.members[0].digest() == alone.digest()
        x, _ = classes(20, seed=1)
        assert torch.equal(one.predict(x).log_probs, alone.predict(x).log_probs)

    def test_gives_what_its_member_gives(self) -> None:
        trained = fit(MAP()).model
        one = fit(Ensemble(members=1, recipe=Laplace(prior_precision=1.0)), model=trained)
        (member,) = one.members
        assert torch.equal(one.log_evidence(), member.log_evidence())
        for found, expected in zip(one.marginals(), member.marginals(), strict=True):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


class TestTogether:
    """Training all members at once is only faster."""

    @pytest.mark.parametrize(
        ("changes", "settings"),
        [
            ({}, {}),
            ({"start": "model", "perturbation": 0.3}, {}),
            ({"bootstrap": True}, {"optimizer": "sgd", "lr": 0.1}),
            ({"recipe": MAP(prior_precision=2.0, temperature="validation")}, {"weight_decay": 0.1}),
            ({}, {"shuffle": False, "schedule": "linear", "warmup": 0.2}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("task", ["classes", "numbers"])
    def test_finds_the_same_members(self, task: str, changes: dict[str, Any], settings: dict[str, Any]) -> None:
        data, validation = (classes(), classes(30, 1)) if task == "classes" else (numbers(), numbers(30, 1))
        options: dict[str, Any] = {"likelihood": "categorical" if task == "classes" else "gaussian"}
        options |= {"validation": validation, "training": TRAINING.replace(**settings)}
        recipe, model = Ensemble(members=3, **changes), dense(3 if task == "classes" else 2)
        together = fit(recipe.replace(together=True), data, model, **options)
        apart = fit(recipe.replace(together=False), data, model, **options)
        for one, other in zip(together.members, apart.members, strict=True):
            torch.testing.assert_close(weights_of(one), weights_of(other), rtol=1e-10, atol=1e-12)
            assert one.temperature == pytest.approx(other.temperature, rel=1e-6)
        y = validation[1]
        torch.testing.assert_close(
            together.predict(validation[0]).log_prob(y), apart.predict(validation[0]).log_prob(y), rtol=1e-6, atol=1e-8
        )

    def test_one_linear_layer_frozen_weights_and_missing_biases(self) -> None:
        frozen = dense()
        frozen[0].weight.requires_grad_(False)
        bare = seeded_layers(lambda: nn.Linear(4, 5, bias=False), nn.ReLU, lambda: nn.Linear(5, 3, bias=False))
        for model in (frozen, bare, seeded_layers(lambda: nn.Linear(4, 3))[0]):
            both = [fit(Ensemble(members=2, together=together), model=model) for together in (True, False)]
            for one, other in zip(*(each.members for each in both), strict=True):
                torch.testing.assert_close(weights_of(one), weights_of(other), rtol=1e-10, atol=1e-12)
        assert torch.equal(both[0].model.weight.requires_grad_(), both[0].members[0].model.weight)

    def test_is_the_default_where_it_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        used: list[Any] = []
        from dubito.methods.ensembles import batched_members as together

        original = together.BatchedMembers.build
        monkeypatch.setattr(together.BatchedMembers, "build", lambda self, p: used.append(self) or original(self, p))
        fit(Ensemble(members=2))
        assert len(used) == 1
        loader = DataLoader(TensorDataset(*classes()), batch_size=16)
        for recipe, data, model, training in (
            (Ensemble(members=2, together=False), None, None, TRAINING),
            (Ensemble(members=2), loader, None, TRAINING),
            (Ensemble(members=2), None, normalized(), TRAINING),
            (Ensemble(members=2, recipe=Variational()), None, None, TRAINING),
            (Ensemble(members=2, recipe=MAP(prior=priors.StudentT(3.0))), None, None, TRAINING),
            (Ensemble(members=2), None, None, TRAINING.replace(clip=1.0)),
        ):
            fit(recipe, data, model, training=training)
        assert len(used) == 1

    def test_a_network_that_mixes_rows_is_trained_alone(self) -> None:
        class Centred(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x - x.mean(0))

        model = Centred(*dense())
        with pytest.raises(InputError, match="trained together: the network mixes the rows of a batch"):
            fit(Ensemble(members=2, together=True), model=model)
        assert len(fit(Ensemble(members=2), model=model).members) == 2

    def test_says_why_it_cannot(self) -> None:
        tied = dense()
        tied[2] = nn.Linear(8, 8).double()
        tied.append(nn.Linear(8, 3).double())
        tied[4] = tied[2]
        tied[5] = nn.Linear(8, 3).double()
        for recipe, model, data, sentence in (
            (Ensemble(recipe=Laplace(), together=True), None, None, "only MAP"),
            (Ensemble(together=True), normalized(), None, "plain linear layers"),
            (Ensemble(together=True), None, DataLoader(TensorDataset(*classes())), "in memory"),
            (Ensemble(together=True), tied[:6], None, "share weights"),
        ):
            with pytest.raises(InputError, match=f"cannot be trained together: .*{sentence}"):
                fit(recipe, data, model)


class TestMembers:
    def test_start_and_order_differ(self) -> None:
        start = fit(Ensemble(members=3), training=TRAINING.replace(epochs=0))
        firsts = [weights_of(member) for member in start.members]
        assert not any(torch.equal(a, b) for a, b in pairwise([*firsts, weights_of(fit(MAP(train=False)))]))
        same_start = fit(Ensemble(members=3, start="model", perturbation=0.0, together=False))
        orders = [weights_of(member) for member in same_start.members]
        assert not any(torch.equal(a, b) for a, b in pairwise(orders))

    def test_near_the_model_by_the_size_of_its_weights(self) -> None:
        model = seeded_layers(lambda: nn.Linear(4, 400), nn.ReLU, lambda: nn.Linear(400, 3))
        found = fit(Ensemble(members=3, start="model", perturbation=0.2, recipe=MAP(train=False)), model=model)
        assert torch.equal(weights_of(found.members[0]), weights_of(fit(MAP(train=False), model=model)))
        for member in found.members[1:]:
            for name, value in member.model.named_parameters():
                given = model.get_parameter(name)
                if value.numel() > 1000:
                    spread = (value - given).std() / given.square().mean().sqrt()
                    assert spread.item() == pytest.approx(0.2, rel=0.1)

    def test_each_carries_its_own_buffers(self) -> None:
        found = fit(Ensemble(members=2), model=normalized())
        x, _ = classes(20, seed=1)
        first, second = (member.model[1].running_mean for member in found.members)
        assert not torch.equal(first, second)
        expected = torch.stack([member.model(x).softmax(-1) for member in found.members]).mean(0)
        torch.testing.assert_close(found.predict(x).probs, expected.detach(), rtol=1e-12, atol=1e-12)

    def test_laplace_posteriors_are_trained_first(self) -> None:
        x, y = classes()
        found = fit(Ensemble(members=2, recipe=Laplace(structure="full", prior_precision=1.5)))
        trained = fit(Ensemble(members=2, together=False))
        for member, network in zip(found.members, trained.members, strict=True):
            torch.testing.assert_close(weights_of(member), weights_of(network), rtol=1e-10, atol=1e-12)
            alone = Laplace(structure="full", prior_precision=1.5).fit(network.model, (x, y))
            torch.testing.assert_close(member.log_evidence(), alone.log_evidence(), rtol=1e-8, atol=0.0)
        generator = torch.Generator().manual_seed(4)
        by_hand = mixture([m.predictor(32, generator)(x) for m in found.members])
        again = found.predict(x, generator=torch.Generator().manual_seed(4))
        torch.testing.assert_close(again.log_probs, by_hand.log_probs.detach(), rtol=1e-12, atol=1e-12)
        assert again.samples.shape == (64, 50, 3)
        assert not torch.equal(found.predict(x, link="mc").probs, again.probs)

    def test_bootstrap_is_training_on_drawn_rows(self) -> None:
        data = classes()
        found = fit(Ensemble(members=2, bootstrap=True))
        plain = fit(Ensemble(members=2))
        from dubito.core.randomness import derive_seed, draw_seed

        seed = draw_seed(torch.Generator().manual_seed(3))
        drawn = resampled(data, derive_seed(seed, "bootstrap"))
        by_hand = fit(MAP(start="fresh"), drawn)
        torch.testing.assert_close(weights_of(found.members[0]), weights_of(by_hand), rtol=1e-10, atol=1e-12)
        assert not torch.allclose(weights_of(found.members[0]), weights_of(plain.members[0]))

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_bootstrap_of_every_form_of_data(self, shuffle: bool) -> None:
        x, y = classes()
        rows = drawn_rows(50, seed=7)
        loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=shuffle)
        batches = list(resampled(loader, 7))
        assert [len(part[0]) for part in batches] == [16, 16, 16, 2]
        total = torch.cat([part[0] for part in batches])
        torch.testing.assert_close(total.sort(0).values, x[rows].sort(0).values, rtol=0.0, atol=0.0)
        pairs = [(value, label) for value, label in zip(x, y, strict=True)]
        subset = resampled(_Listed(pairs), 7)
        assert all(torch.equal(subset[i][0], x[rows[i]]) for i in range(50))

    def test_bootstrap_needs_single_examples(self) -> None:
        x, y = classes()
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 50, 50)
        with pytest.raises(UnsupportedError, match="without a sampler of its own"):
            fit(Ensemble(members=2, bootstrap=True), DataLoader(TensorDataset(x, y), sampler=sampler))


class _Listed(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class TestPosterior:
    def test_several_modes_have_no_marginals(self) -> None:
        found = fit(Ensemble(members=2))
        with pytest.raises(UnsupportedError, match="the mean of their weights is no useful network"):
            found.marginals()
        with pytest.raises(UnsupportedError, match="no evidence of its own"):
            found.log_evidence()
        with pytest.raises(UnsupportedError, match="flat prior"):
            found.prior()

    def test_samples_take_turns(self) -> None:
        found = fit(Ensemble(members=3))
        drawn = found.sample(5)
        for s in range(5):
            own = params.of(found.members[s % 3].model)
            assert all(torch.equal(value[s], own[name]) for name, value in drawn.items())
        assert len(found.sample(1)["0.weight"]) == 1

    def test_a_shared_prior_and_priors_of_their_own(self) -> None:
        shared = fit(Ensemble(members=2, recipe=MAP(prior_precision=4.0)))
        assert float(shared.prior()[1]["0.weight"].unique()) == 0.25
        tuned = fit(Ensemble(members=2, recipe=Laplace(prior_precision="evidence")))
        with pytest.raises(UnsupportedError, match="different priors"):
            tuned.prior()

    def test_multi_swag(self) -> None:
        found = fit(Ensemble(members=2, recipe=SWAG(rank=2, collect_every=2)), model=normalized())
        assert found.predict(classes()[0], num_samples=4).samples.shape[0] == 8
        assert not torch.equal(*(member.variance for member in found.members))

    def test_ensembles_nest(self) -> None:
        found = fit(Ensemble(members=2, recipe=Ensemble(members=2)))
        assert found.predict(classes()[0]).samples.shape[0] == 4

    def test_the_loaders_generator_is_part_of_the_order(self) -> None:
        def loader() -> DataLoader[Any]:
            own = torch.Generator().manual_seed(9)
            return DataLoader(TensorDataset(*classes()), batch_size=16, shuffle=True, generator=own)

        first, second = (fit(Ensemble(members=2), loader()) for _ in range(2))
        assert first.digest() == second.digest()
        other = DataLoader(TensorDataset(*classes()), 16, shuffle=True, generator=torch.Generator().manual_seed(8))
        assert fit(Ensemble(members=2), other).digest() != first.digest()

    def test_another_call_with_the_same_generator_finds_another(self) -> None:
        for recipe in (Ensemble(members=2), Ensemble(members=2, together=False)):
            generator = torch.Generator().manual_seed(3)
            first, second = (fit(recipe, generator=generator) for _ in range(2))
            pairs = zip(first.members, second.members, strict=True)
            assert not any(torch.equal(weights_of(a), weights_of(b)) for a, b in pairs)

    def test_the_users_things_stay(self) -> None:
        model, data = dense().train(), classes()
        before, copies = copy.deepcopy(model.state_dict()), [part.clone() for part in data]
        for start in ("fresh", "model"):
            fit(Ensemble(members=2, start=start, together=False), data, model)  # type: ignore[arg-type]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(map(torch.equal, data, copies))
        assert model.training


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"members": 0}, "at least 1"),
            ({"members": 2.5}, "`members` must be a whole number of at least 1"),
            ({"recipe": "laplace"}, "must be a recipe"),
            ({"start": "warm"}, "`start` must be 'model', 'fresh' or 'head'"),
            ({"perturbation": -1.0}, "`perturbation` must be a number of at least 0"),
            ({"together": "yes"}, "True, False or 'auto'"),
            ({"recipe": MAP(start="fresh"), "start": "model"}, "starts fresh, but the ensemble starts from the model"),
            ({"recipe": MAP(train=False)}, "untrained network"),
        ],
        ids=str,
    )
    def test_wrong_ones_are_one_sentence(self, arguments: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            Ensemble(**arguments)

    def test_by_text(self) -> None:
        assert dubito.parse("ensemble(members=3, recipe=laplace(structure=kron))") == Ensemble(3, Laplace())
        assert dubito.parse("ensemble(recipe=swag(weights=select.last_layer()))") == Ensemble(
            recipe=SWAG(weights=select.last_layer())
        )
        assert dubito.parse("snapshot(4)") == Snapshot(4)

    def test_training_is_that_of_the_first_step(self) -> None:
        assert Ensemble(recipe=Laplace()).default_training() == Training()
        assert Ensemble(recipe=SWAG()).default_training() == SWAG().default_training()

    def test_the_steps_are_those_of_the_recipe(self) -> None:
        with pytest.raises(UnsupportedError, match="call fit instead"):
            Ensemble().build(None)  # type: ignore[arg-type]
