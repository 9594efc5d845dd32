"""Which weights are random: one vector and back, set operations, masks, states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dubito.core.settings import Setting, setting
from dubito.networks.selection import Selection
from dubito.select.rule import SelectionRule

Shapes = dict[str, tuple[int, ...]]


@st.composite
def selections(draw: Any, shapes: Shapes | None = None) -> Selection:
    if shapes is None:
        extents = st.lists(st.integers(1, 4), max_size=3).map(tuple)
        shapes = draw(st.dictionaries(st.sampled_from(list("abcde")), extents, min_size=1))
    indices: dict[str, Tensor | None] = {}
    for name, shape in shapes.items():
        kind = draw(st.sampled_from(["out", "whole", "part"]))
        if kind == "whole":
            indices[name] = None
        elif kind == "part":
            chosen = draw(st.sets(st.integers(0, math.prod(shape) - 1)))
            indices[name] = torch.tensor(list(chosen), dtype=torch.long)
    return Selection(shapes, indices)


def numbers(*shape: int, start: float = 0.5) -> Tensor:
    """Different numbers in every place, none of them whole."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + start


def values_for(shapes: Shapes) -> dict[str, Tensor]:
    return {name: numbers(*shape, start=1000.5 * i) for i, (name, shape) in enumerate(shapes.items(), start=1)}


def brute_force_ravel(selection: Selection, values: dict[str, Tensor]) -> list[float]:
    chosen: list[float] = []
    for name, mask in selection.masks().items():
        entries = zip(values[name].flatten().tolist(), mask.flatten().tolist(), strict=True)
        chosen += [value for value, selected in entries if selected]
    return chosen


class TestRavelAndMerge:
    @given(selections(), st.sampled_from([(), (1,), (3,), (2, 3)]))
    def test_round_trip(self, selection: Selection, lead: tuple[int, ...]) -> None:
        base = values_for(selection.shapes)
        flat = numbers(*lead, selection.num_weights)
        merged = selection.merge(base, flat)
        masks = selection.masks()
        for name, value in merged.items():
            assert value.shape == (*lead, *base[name].shape)
            expected = base[name].expand(value.shape)
            assert torch.equal(value.masked_select(~masks[name]), expected.masked_select(~masks[name]))
        if selection.num_weights:
            assert torch.equal(selection.ravel(merged), flat)

    @given(selections())
    def test_the_order_is_that_of_the_model_and_of_the_flattened_entries(self, selection: Selection) -> None:
        values = values_for(selection.shapes)
        if selection.num_weights:
            assert selection.ravel(values).tolist() == brute_force_ravel(selection, values)
            assert selection.num_weights == sum(int(mask.sum()) for mask in selection.masks().values())
            for name, span in selection.slices.items():
                flat = selection.ravel(values)[span]
                assert torch.equal(flat, values[name].reshape(-1)[selection.positions(name)])

    @pytest.mark.slow
    @given(selections())
    def test_nothing_is_changed_in_place(self, selection: Selection) -> None:
        base = values_for(selection.shapes)
        before = {name: value.clone() for name, value in base.items()}
        merged = selection.merge(base, torch.zeros(selection.num_weights, dtype=torch.float64))
        for name in selection.indices:
            merged[name].add_(1)
        for name, value in base.items():
            assert torch.equal(value, before[name])

    @given(selections())
    def test_fill(self, selection: Selection) -> None:
        flat = numbers(selection.num_weights)
        filled = selection.fill(flat, fill=7.0)
        masks = selection.masks()
        assert list(filled) == selection.names
        for name, value in filled.items():
            assert bool((value.masked_select(~masks[name]) == 7.0).all())
        if selection.num_weights:
            assert torch.equal(selection.ravel(filled), flat)

    def test_gradients_flow_through_both(self) -> None:
        selection = Selection({"w": (2, 2), "b": (2,)}, {"w": torch.tensor([1, 2]), "b": None})
        flat = torch.randn(4, dtype=torch.float64, requires_grad=True)
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        (selection.ravel(selection.merge(values_for(selection.shapes), flat)) * weight).sum().backward()
        assert torch.equal(flat.grad, weight)

    def test_the_vector_decides_the_dtype_of_what_it_fills(self) -> None:
        selection = Selection({"w": (3,)}, {"w": torch.tensor([0])})
        merged = selection.merge({"w": torch.ones(3)}, torch.tensor([0.1], dtype=torch.float64))
        assert merged["w"].tolist() == [0.1, 1.0, 1.0]

    def test_what_does_not_fit(self) -> None:
        selection = Selection({"w": (2, 2)}, {"w": None})
        with pytest.raises(InputError, match="Expected 4 selected weights, got a vector of 3"):
            selection.merge({"w": torch.zeros(2, 2)}, torch.zeros(3))
        with pytest.raises(InputError, match="'w' is missing"):
            selection.merge({}, torch.zeros(4))
        with pytest.raises(InputError, match="'w' is missing"):
            selection.ravel({})
        with pytest.raises(InputError, match=r"'w' has shape \(4, 1\), but the selection knows it as \(2, 2\)"):
            selection.ravel({"w": torch.zeros(4, 1)})
        with pytest.raises(InputError, match="Nothing is selected"):
            (~selection).ravel({"w": torch.zeros(2, 2)})


SHAPES: Shapes = {"a": (2, 3), "b": (), "c": (4,)}


class TestSets:
    @pytest.mark.slow
    @given(selections(SHAPES), selections(SHAPES), selections(SHAPES))
    def test_laws(self, x: Selection, y: Selection, z: Selection) -> None:
        assert x | y == y | x
        assert x & y == y & x
        assert x | (y & z) == (x | y) & (x | z)
        assert ~(x | y) == ~x & ~y
        assert ~~x == x
        assert (x & ~x).num_weights == 0
        assert (x | ~x).num_weights == x.total == 11

    @pytest.mark.slow
    @given(selections(SHAPES), selections(SHAPES))
    def test_equal_to_logic_on_masks(self, x: Selection, y: Selection) -> None:
        for name in SHAPES:
            assert torch.equal((x | y).masks()[name], x.masks()[name] | y.masks()[name])
            assert torch.equal((x & y).masks()[name], x.masks()[name] & y.masks()[name])
            assert torch.equal((~x).masks()[name], ~x.masks()[name])

    def test_different_networks(self) -> None:
        with pytest.raises(InputError, match="different networks"):
            Selection({"a": (2,)}, {"a": None}) | Selection({"a": (3,)}, {"a": None})

    @pytest.mark.slow
    @given(selections())
    def test_masks_and_states_come_back(self, selection: Selection) -> None:
        assert Selection.from_masks(selection.shapes, selection.masks()) == selection
        model = nn.Module()
        for name, shape in selection.shapes.items():
            model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        again = Selection.from_state(selection.to_state(), model)
        assert again == selection
        assert list(again.indices) == list(selection.indices)
        assert again.slices == selection.slices

    def test_all_entries_one_by_one_are_the_whole(self) -> None:
        one_by_one = Selection({"a": (2, 2)}, {"a": torch.tensor([3, 1, 0, 2])})
        assert one_by_one == Selection({"a": (2, 2)}, {"a": None})
        assert one_by_one.is_whole("a")

    def test_inequality(self) -> None:
        x = Selection({"a": (3,)}, {"a": torch.tensor([0])})
        assert x != Selection({"a": (3,)}, {"a": torch.tensor([1])})
        assert x != Selection({"a": (4,)}, {"a": torch.tensor([0])})
        assert x != "x"


class TestInvalid:
    @pytest.mark.parametrize(
        ("indices", "message"),
        [
            ({"z": None}, "has no parameter 'z'; it has a, b, c"),
            ({"a": torch.tensor([6])}, "'a' has 6 weights; a selected position lies outside"),
            ({"a": torch.tensor([-1])}, "outside of them"),
            ({"a": torch.tensor([1, 1])}, "A weight of 'a' is selected twice"),
        ],
    )
    def test_indices(self, indices: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            Selection(SHAPES, indices)

    def test_masks(self) -> None:
        with pytest.raises(InputError, match=r"mask of 'a' has shape \(3, 2\), the weight \(2, 3\)"):
            Selection.from_masks(SHAPES, {"a": torch.ones(3, 2, dtype=torch.bool)})
        with pytest.raises(InputError, match="no parameter 'z'"):
            Selection.from_masks(SHAPES, {"z": torch.ones(1, dtype=torch.bool)})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_parameters_are_counted_once() -> None:
    selection = Selection.all_of(Tied())
    assert selection.num_weights == selection.total == 9 + 3 + 3
    assert selection.names == ["first.weight", "first.bias", "second.bias"]


def test_frozen_parameters_are_not_selected() -> None:
    model = Tied()
    model.first.weight.requires_grad_(False)
    assert Selection.all_of(model).names == ["first.bias", "second.bias"]
    assert Selection.all_of(model, ["first.weight"]).num_weights == 9


def test_the_picture() -> None:
    text = repr(Selection({"a": (1000, 2), "b": (2,)}, {"a": torch.arange(500)}))
    assert text.splitlines()[0] == "Selection of 500 of 2,002 weights"
    assert "█████···············       500 of 2,000" in text
    assert "····················         0 of 2" in text


@setting
class Named(SelectionRule):
    setting_name = "testing.named"
    name: str

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        return Selection.all_of(model, [self.name])


class TestRules:
    def test_rules_combine_like_selections(self) -> None:
        model = Tied()
        weight, bias = Named("first.weight"), Named("first.bias")
        assert (weight | bias).resolve(model).names == ["first.weight", "first.bias"]
        assert (weight & bias).resolve(model).num_weights == 0
        assert (~weight).resolve(model).names == ["first.bias", "second.bias"]

    def test_the_complement_leaves_out_what_is_frozen(self) -> None:
        model = Tied()
        model.second.bias.requires_grad_(False)
        assert (~Named("first.weight")).resolve(model).names == ["first.bias"]

    def test_they_print_as_typed_and_travel(self) -> None:
        a, b, c = Named("a"), Named("b"), Named("c")
        rule = ~(a | b) & c | ~a
        text = "~(testing.named('a') | testing.named('b')) & testing.named('c') | ~testing.named('a')"
        assert repr(rule) == text
        assert Setting.from_json(rule.to_json()) == rule
        assert rule != a
        assert repr(a | (b | c)) != repr((a | b) | c)

    def test_all_arguments_reach_both_sides(self) -> None:
        seen: list[Any] = []

        @setting
        class Recorder(SelectionRule):
            def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
                seen.append((args, kwargs))
                return Selection.all_of(model)

        (Recorder() | ~Recorder() & Recorder()).resolve(Tied(), None, prior_precision=3.0)
        assert [(args[0], kwargs) for args, kwargs in seen] == [(None, {"prior_precision": 3.0})] * 3

    def test_a_rule_without_resolve_cannot_be_made(self) -> None:
        @setting
        class Unfinished(SelectionRule):
            pass

        with pytest.raises(TypeError, match="abstract"):
            Unfinished()  # type: ignore[abstract]
