"""Which weights `select.subnetwork` chooses, and what happens where it cannot."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import Categorical
from subnetwork_cases import Tied, case, centred
from torch import Tensor, nn

import dubito
from dubito import Laplace, select
from dubito.core.batches import Source
from dubito.core.settings import Setting
from dubito.networks.selection import Selection
from dubito.select.budgets import make_budget
from oracles import Case, curvature, jacobian

PRIOR = 0.7


def order(one: Case, rule: select.subnetwork, **options) -> list[int]:
    return rule.rank(one.model, one.data, one.likelihood, PRIOR, **options).order.tolist()


def output_variance(one: Case) -> Tensor:
    return centred(one, jacobian(one), one.targets).square().sum(0) / (curvature(one).diagonal() + PRIOR)


class TestRules:
    @pytest.mark.parametrize("name", ["categorical", "line", "image", "tied"])
    def test_output_variance(self, name: str) -> None:
        one = case(name)
        assert order(one, select.subnetwork(9)) == output_variance(one).argsort(descending=True)[:9].tolist()

    def test_output_variance_with_kronecker_marginals(self) -> None:
        one = case("categorical")
        posterior = Laplace(structure="kron", prior_precision=PRIOR).fit(one.model, one.data)
        variance = one.weights().ravel(posterior.marginals()[1])
        expected = (centred(one, jacobian(one)).square().sum(0) * variance).argsort(descending=True)[:9].tolist()
        for of in ("kron", posterior.recipe, posterior):
            assert order(one, select.subnetwork(9, variance=of)) == expected
        assert expected != order(one, select.subnetwork(9))

    def test_weight_variance(self) -> None:
        one = case("categorical")
        expected = curvature(one).diagonal().argsort()[:9]
        assert order(one, select.subnetwork(9, rule="weight-variance")) == expected.tolist()
        chosen = select.largest_variance(9).resolve(one.model, one.data, one.likelihood, PRIOR)
        assert torch.equal(_flat(one, chosen), expected.sort().values)

    def test_weight_variance_of_a_recipe_or_posterior(self) -> None:
        one = case("categorical")
        recipe = Laplace(structure="diag", prior_precision=PRIOR)
        posterior = recipe.fit(one.model, one.data)
        expected = select.largest_variance(9).resolve(one.model, one.data, one.likelihood, PRIOR)
        assert select.largest_variance(9, of=recipe).resolve(one.model, one.data) == expected
        assert select.largest_variance(9, of=posterior).resolve(one.model, one.data) == expected
        assert select.largest_variance(9, of=posterior).resolve(one.model) == expected  # it needs no data

    def test_any_object_with_marginals_will_do(self) -> None:
        one = case("categorical")

        class Known:
            def marginals(self):
                return None, {name: value.detach() ** 2 for name, value in one.model.named_parameters()}

            def digest(self) -> str:
                return "known"

        chosen = select.largest_variance(9, of=Known()).resolve(one.model, one.data)
        assert chosen == select.largest_magnitude(9).resolve(one.model)

    def test_magnitude_and_random_are_the_rules_of_that_name(self) -> None:
        one = case("categorical")
        largest = select.subnetwork(9, rule="magnitude").resolve(one.model)
        assert largest == select.largest_magnitude(9).resolve(one.model)
        drawn = select.subnetwork(9, rule="random").resolve(one.model, generator=torch.Generator().manual_seed(3))
        assert drawn == select.random(9).resolve(one.model, generator=torch.Generator().manual_seed(3))

    @pytest.mark.slow
    def test_sampled_draws_in_proportion_to_the_score(self) -> None:
        one = case("categorical")
        scores = output_variance(one)
        generator = torch.Generator().manual_seed(0)
        draws = [order(one, select.subnetwork(2, rule="sampled"), generator=generator) for _ in range(300)]
        assert all(len(set(pair)) == 2 for pair in draws)
        frequency = torch.bincount(torch.tensor([first for first, _ in draws]), minlength=len(scores)) / len(draws)
        expected = scores / scores.sum()
        error = (expected * (1 - expected) / len(draws)).sqrt()
        assert bool(((frequency - expected).abs() < 4.5 * error + 1e-12).all())

    def test_sampled_is_repeatable(self) -> None:
        one, rule = case("categorical"), select.subnetwork(9, rule="sampled")
        assert order(one, rule) == order(one, rule)
        assert order(one, rule) != order(one, rule, generator=torch.Generator().manual_seed(1))

    def test_context_moves_the_choice(self) -> None:
        one = case("line")
        context = torch.tensor([[9.0, 0.0, 0.0]])  # float32, as a user may have it
        rows = jacobian(one, context.double()).flatten(0, 1)
        expected = (rows.square().sum(0) / (curvature(one).diagonal() + PRIOR)).argsort(descending=True)[:6]
        found = order(one, select.subnetwork(6, context=context))
        assert found == expected.tolist()
        assert found != order(one, select.subnetwork(6))
        assert order(one, select.subnetwork(6, context=context.numpy())) == found

    def test_sampled_outputs_choose_nearly_the_same(self) -> None:
        one = case("categorical")
        rough = order(one, select.subnetwork(9, num_samples=500))
        assert len(set(rough) & set(order(one, select.subnetwork(9)))) >= 8


class TestInvariance:
    @pytest.mark.parametrize("rule", ["output-variance", "greedy", "weight-variance"])
    def test_the_order_of_parameters_does_not_matter(self, rule: str) -> None:
        one = case("categorical")

        class Reversed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.second, self.first = copy.deepcopy(one.model[2]), copy.deepcopy(one.model[0])

            def forward(self, x: Tensor) -> Tensor:
                return self.second(torch.tanh(self.first(x)))

        data = [(one.inputs[6:], one.targets[6:]), (one.inputs[:6], one.targets[:6])]  # nor that of the data
        mine = select.subnetwork(9, rule=rule).resolve(one.model, one.data, one.likelihood, PRIOR).masks()
        theirs = select.subnetwork(9, rule=rule).resolve(Reversed(), data, one.likelihood, PRIOR).masks()
        for ours, other in {"0": "first", "2": "second"}.items():
            for kind in ("weight", "bias"):
                assert torch.equal(mine[f"{ours}.{kind}"], theirs[f"{other}.{kind}"])

    def test_tied_weights_are_counted_once(self) -> None:
        one = case("tied")
        assert one.weights().num_weights == 9 + 3 + 9 + 3
        chosen = select.subnetwork(24).resolve(one.model, one.data, one.likelihood, PRIOR)
        assert chosen.num_weights == 24
        assert "second.weight" not in chosen.names
        with pytest.raises(InputError, match="up to the 24 candidates"):
            select.subnetwork(25).resolve(one.model, one.data)

    def test_a_source_a_loader_and_a_pair_are_the_same(self) -> None:
        one, rule = case("categorical"), select.subnetwork(9)
        expected = rule.resolve(one.model, one.data, one.likelihood, PRIOR)
        dataset = torch.utils.data.TensorDataset(*one.data)
        loader = torch.utils.data.DataLoader(dataset, batch_size=3, shuffle=True)
        for data in (Source(one.data, batch_size=4), dataset, loader, [one.data]):
            assert rule.resolve(one.model, data, "categorical", PRIOR) == expected


class TestCandidatesAndBudgets:
    def test_candidates(self) -> None:
        one = case("image")
        names = {
            "weights": ["0.weight", "4.weight"],
            "1": ["1.weight", "1.bias"],
            nn.Conv2d: ["0.weight", "0.bias"],
            ("*.bias", nn.Linear): ["0.bias", "1.bias", "4.weight", "4.bias"],
            ~select.last_layer(): ["0.weight", "0.bias", "1.weight", "1.bias"],
        }
        scores = one.weights().fill(output_variance(one))
        for candidates, expected in names.items():
            chosen = select.subnetwork(5, candidates=candidates).resolve(one.model, one.data, one.likelihood, PRIOR)
            among = Selection.all_of(one.model, expected)
            best = among.ravel(scores).argsort(descending=True)[:5]
            assert set(chosen.names) <= set(expected)
            assert torch.equal(_flat(one, chosen, among), best.sort().values)

    def test_a_fraction_is_of_the_candidates(self) -> None:
        one = case("image")
        size = sum(one.model.get_parameter(name).numel() for name in ("0.weight", "4.weight"))
        chosen = select.subnetwork(0.5, candidates="weights").resolve(one.model, one.data)
        assert chosen.num_weights == round(0.5 * size)

    def test_frozen_weights_are_no_candidates(self) -> None:
        one = case("categorical")
        one.model[0].requires_grad_(False)
        chosen = select.subnetwork(15).resolve(one.model, one.data)
        assert chosen.names == ["2.weight", "2.bias"]
        everything = select.mask({"0.weight": torch.ones(4, 3), "2.bias": torch.ones(3)})
        assert select.subnetwork(3, candidates=everything).resolve(one.model, one.data).names == ["2.bias"]

    def test_limits_by_name(self) -> None:
        one = case("image")
        scores = one.weights().fill(output_variance(one))
        limits = {"0": 2, "0.weight": 1, "4": 0.1, "1.bias": 0}
        chosen = select.subnetwork(8, per_layer=limits).resolve(one.model, one.data, one.likelihood, PRIOR)
        counts = {name: span.stop - span.start for name, span in chosen.slices.items()}
        # 0.weight has a limit of its own; the other parameters of layer 0 share theirs; layer 4 has 57 weights
        assert counts["0.weight"] <= 1
        assert counts.get("0.bias", 0) <= 2
        assert counts["4.weight"] + counts.get("4.bias", 0) <= 6
        assert "1.bias" not in counts
        assert chosen.num_weights == 8
        best = scores["0.weight"].argmax()
        assert chosen.positions("0.weight").tolist() == [best]

    def test_proportional(self) -> None:
        one = case("image")
        chosen = select.subnetwork(20, per_layer="proportional").resolve(one.model, one.data, one.likelihood, PRIOR)
        sizes = {name: value.numel() for name, value in one.model.named_parameters()}
        total = sum(sizes.values())
        assert chosen.num_weights == 20
        for name, size in sizes.items():
            span = chosen.slices.get(name, slice(0, 0))
            assert abs(span.stop - span.start - 20 * size / total) < 1

    def test_the_best_that_limits_allow(self) -> None:
        """Against trying all subsets."""
        from itertools import combinations

        weights = Selection({"a": (4,), "b": (3,)}, {"a": None, "b": None})
        scores = torch.tensor([5.0, 9.0, 7.0, 1.0, 6.0, 6.0, 2.0])
        budget = make_budget(weights, 4, {"a": 2, "b": 2})
        legal = [c for c in combinations(range(7), 4) if sum(i < 4 for i in c) == 2]
        best = max(legal, key=lambda c: float(scores[list(c)].sum()))
        assert budget.best(scores).tolist() == sorted(best, key=lambda i: (-float(scores[i]), i)) == [1, 2, 4, 5]

    def test_ties_go_to_the_earlier_weight(self) -> None:
        weights = Selection({"a": (6,)}, {"a": None})
        assert make_budget(weights, 3, None).best(torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.0])).tolist() == [2, 0, 3]


class TestUse:
    def test_it_prints_parses_hashes_and_travels(self) -> None:
        rule = select.subnetwork(1000, rule="greedy", candidates="weights", per_layer={"fc": 0.5})
        assert repr(rule) == "select.subnetwork(1000, rule='greedy', candidates='weights', per_layer={'fc': 0.5})"
        assert dubito.parse(repr(rule)) == rule
        assert dubito.parse("laplace(weights=subnetwork(100, rule=output-variance, variance=kron))").weights == (
            select.subnetwork(100, variance="kron")
        )
        assert dubito.parse("select.largest_variance(9, of=laplace(structure=diag))") == (
            select.largest_variance(9, of=Laplace(structure="diag"))
        )
        context, tensors = torch.randn(4, 3), {}
        looking = select.subnetwork(10, context=context)
        back = Setting.from_json(json.loads(json.dumps(looking.to_json(tensors))), tensors)
        assert back == looking
        assert hash(back) == hash(looking)
        assert looking != select.subnetwork(10, context=context + 1)
        assert "<tensor 4x3" in repr(looking)

    def test_a_posterior_inside_is_not_saved(self) -> None:
        one = case("categorical")
        posterior = Laplace(structure="diag", prior_precision=PRIOR).fit(one.model, one.data)
        back = Setting.from_json(json.loads(json.dumps(select.largest_variance(3, of=posterior).to_json())))
        with pytest.raises(InputError, match="not saved with the rule"):
            back.resolve(one.model, one.data)

    def test_union_with_the_last_layer(self) -> None:
        one = case("categorical")
        both = select.last_layer() | select.subnetwork(5, candidates=~select.last_layer())
        chosen = both.resolve(one.model, one.data, one.likelihood, PRIOR)
        assert chosen.num_weights == 15 + 5
        assert chosen.is_whole("2.weight")
        assert chosen.is_whole("2.bias")

    def test_the_selection_is_saved_with_the_posterior(self, tmp_path) -> None:
        one = case("categorical")
        recipe = Laplace(structure="full", weights=select.subnetwork(9, rule="sampled"), prior_precision=PRIOR)
        posterior = recipe.fit(one.model, one.data, generator=torch.Generator().manual_seed(4))
        posterior.save(tmp_path / "posterior.safetensors")
        loaded = dubito.load(tmp_path / "posterior.safetensors", one.model)
        assert loaded.selection == posterior.selection
        assert loaded.recipe == recipe
        assert torch.equal(loaded.predict(one.inputs).probs, posterior.predict(one.inputs).probs)

    def test_it_prints_what_it_chose(self) -> None:
        one = case("categorical")
        chosen = select.subnetwork(9).resolve(one.model, one.data)
        header, *lines = repr(chosen).splitlines()
        assert header == "Selection of 9 of 31 weights"
        for line, (name, span) in zip(lines, chosen.slices.items(), strict=True):
            assert line.split()[0] == name
            assert line.split()[2:] == [str(span.stop - span.start), "of", str(one.model.get_parameter(name).numel())]
        few = repr(Selection({"a": (1000,)}, {"a": torch.tensor([3])}))
        assert "▏···················         1 of 1,000" in few


def dead_network() -> Case:
    """The first unit never fires, and the last input is always 0."""
    one = case("categorical")
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(5.0)
        model[0].bias[0] = -1e3
    inputs = one.inputs.clone()
    inputs[:, 2] = 0.0
    return Case(model, inputs, one.targets, Categorical())


class TestDeadWeights:
    def test_the_paper_s_rule_prefers_them_and_warns(self) -> None:
        one = dead_network()
        with pytest.warns(select.SelectionWarning, match="5 of the 5 chosen weights cannot change an output"):
            chosen = select.largest_variance(5).resolve(one.model, one.data)
        assert float(jacobian(one).flatten(0, 1)[:, _flat(one, chosen)].abs().max()) == 0

    def test_other_rules_choose_them_last(self) -> None:
        one = dead_network()
        alive = int((jacobian(one).flatten(0, 1).abs().amax(0) > 0).sum())
        for rule in ("output-variance", "sampled", "greedy"):
            chosen = select.subnetwork(alive, rule=rule).resolve(one.model, one.data)
            assert float(jacobian(one).flatten(0, 1)[:, _flat(one, chosen)].abs().amax(0).min()) > 0
            with pytest.warns(select.SelectionWarning, match=f"1 of the {alive + 1} chosen"):
                select.subnetwork(alive + 1, rule=rule).resolve(one.model, one.data)

    def test_all_weights_are_no_choice_and_no_warning(self) -> None:
        one = dead_network()
        assert select.subnetwork(31).resolve(one.model, one.data).num_weights == 31

    @pytest.mark.parametrize("rule", ["output-variance", "sampled", "greedy", "weight-variance"])
    def test_nothing_but_dead_candidates(self, rule: str) -> None:
        one = dead_network()
        dead = select.mask({"0.weight": torch.tensor([1, 0, 0, 0])[:, None].expand(4, 3).bool()})
        with pytest.raises(InputError, match="No candidate can change an output"):
            select.subnetwork(2, rule=rule, candidates=dead).resolve(one.model, one.data)


class TestBadInput:
    @pytest.mark.parametrize("size", [0, -3, 32, 1.5, 0.001])
    def test_sizes(self, size: float) -> None:
        one = case("categorical")
        for rule in ("output-variance", "greedy", "magnitude", "random", "weight-variance"):
            with pytest.raises(InputError, match="not possible: choose a whole number up to the 31 candidates"):
                select.subnetwork(size, rule=rule).resolve(one.model, one.data)

    def test_context(self) -> None:
        one = case("categorical")
        narrow = select.subnetwork(3, context=torch.randn(5, 2))
        with pytest.raises(InputError, match=r"cannot be called on the context inputs of shape \(5, 2\)"):
            narrow.resolve(one.model, one.data)
        with pytest.raises(InputError, match="cannot be called on the context inputs"):
            Laplace(weights=narrow).fit(one.model, one.data)
        with pytest.raises(InputError, match="nothing in the context"):
            select.subnetwork(3, context=torch.randn(0, 3)).resolve(one.model, one.data)
        with pytest.raises(InputError, match="The context inputs hold NaN"):
            select.subnetwork(3, context=torch.full((2, 3), torch.nan)).resolve(one.model, one.data)
        with pytest.raises(InputError, match="does not use inputs"):
            select.subnetwork(3, rule="random", context=torch.randn(5, 3))

    def test_nothing_trainable(self) -> None:
        one = case("categorical")
        one.model.requires_grad_(False)
        with pytest.raises(InputError, match="frozen"):
            select.subnetwork(3).resolve(one.model, one.data)

    def test_candidates(self) -> None:
        one = case("categorical")
        with pytest.raises(InputError, match="No trainable parameter matches 'nothing'"):
            select.subnetwork(3, candidates="nothing").resolve(one.model, one.data)
        one.model.requires_grad_(False)[2].requires_grad_(True)
        with pytest.raises(InputError, match="leaves no trainable weight"):
            select.subnetwork(3, candidates=select.mask({"0.bias": torch.ones(4)})).resolve(one.model, one.data)

    def test_per_layer(self) -> None:
        one = case("categorical")
        with pytest.raises(InputError, match="has the key 'nothing', but no candidate"):
            select.subnetwork(3, per_layer={"nothing": 3}).resolve(one.model, one.data)
        with pytest.raises(InputError, match="allows only 5 weights in total, but `size` is 6"):
            select.subnetwork(6, per_layer={"0": 2, "2": 3}).resolve(one.model, one.data)
        with pytest.raises(InputError, match="must be 'proportional'"):
            select.subnetwork(6, per_layer="equal")
        with pytest.raises(InputError, match=r"`per_layer` must be .*, got {'0': -1}"):
            select.subnetwork(6, per_layer={"0": -1}).resolve(one.model, one.data)

    def test_mask_of_wrong_shape(self) -> None:
        one = case("categorical")
        with pytest.raises(InputError, match=r"has shape \(3, 4\), the weight \(4, 3\)"):
            select.subnetwork(3, candidates=select.mask({"0.weight": torch.ones(3, 4)})).resolve(one.model, one.data)

    def test_settings(self) -> None:
        with pytest.raises(InputError, match=r"`rule` must be .*, got 'best'"):
            select.subnetwork(3, rule="best")
        with pytest.raises(InputError, match="must be 'diag', 'kron'"):
            select.subnetwork(3, variance="full")
        for options in ({"num_samples": 0}, {"num_samples": 3, "rule": "greedy"}):
            with pytest.raises(InputError, match="num_samples"):
                select.subnetwork(3, **options)

    def test_no_data(self) -> None:
        one = case("categorical")
        with pytest.raises(InputError, match="needs training data"):
            select.subnetwork(3).resolve(one.model)
        with pytest.raises(InputError, match="no targets"):
            select.subnetwork(3).resolve(one.model, [one.inputs])


def _flat(one: Case, chosen: Selection, among: Selection | None = None) -> Tensor:
    """Where chosen weights are in the flat order of others."""
    among = among or one.weights()
    return among.ravel({name: mask.double() for name, mask in chosen.masks().items()}).nonzero().squeeze(1)


def test_a_tied_network_is_what_it_says() -> None:
    model = Tied()
    assert model.first.weight is model.second.weight
