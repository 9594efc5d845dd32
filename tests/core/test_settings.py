"""Settings print as typed, compare and hash by value, and come back from JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import Gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dubito import SWAG, Laplace, Rank1, priors, select
from dubito.core.constraints import (
    Count,
    OpenProbability,
    Positive,
    PositiveValue,
    Probability,
    Share,
    Start,
    check,
    kinds_of,
)
from dubito.core.grammar import parse
from dubito.core.settings import Absent, Setting, canonical, digest, find, load_all, setting
from dubito.fitting.training import Training
from dubito.methods.ensembles import BatchNormNoise
from dubito.methods.map.recipe import MAP


@setting
class Everything(Setting):
    setting_name = "testing.Everything"
    required: Any
    number: float = 1.0
    text: str = "plain"
    many: tuple[Any, ...] = ()
    table: Mapping[Any, Any] = field(default_factory=dict)
    tensor: Tensor | None = None
    inner: Setting | None = None
    kind: type[Any] | None = None


@setting
class First(Setting):
    setting_name = "testing.Twin"


@setting
class Second(Setting):
    setting_name = "elsewhere.Twin"


@setting
class Child(MAP):
    """A recipe of a user who forgot to name it."""


class Layer(nn.Linear):
    class Inner(nn.Linear):
        pass


def round_trip(value: Setting) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(value.to_json(tensors), allow_nan=False)
    return Setting.from_json(json.loads(text), tensors)


class TestRepr:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (MAP(), "MAP()"),
            (MAP(temperature="validation"), "MAP(temperature='validation')"),
            (MAP(temperature=1), "MAP()"),
            (Training(epochs=3, lr=np.float64(0.1)), "Training(epochs=3, lr=0.1)"),
            (Everything(3), "testing.Everything(3)"),
            (Everything([1, (2,)], many=(MAP(),)), "testing.Everything([1, (2,)], many=(MAP(),))"),
            (Everything({"a": MAP()}, kind=nn.Linear), "testing.Everything({'a': MAP()}, kind=nn.Linear)"),
            (Everything(None, kind=Layer.Inner), "testing.Everything(None, kind=Layer.Inner)"),
            (Child(prior_precision=2.0), "Child(prior_precision=2.0)"),
        ],
    )
    def test_prints_as_typed(self, value: Setting, text: str) -> None:
        assert repr(value) == text

    def test_a_tensor_prints_its_shape_and_digest(self) -> None:
        tensor = torch.zeros(2, 3)
        assert repr(Everything(tensor)) == f"testing.Everything(<tensor 2x3 {digest(tensor)[:6]}>)"


class TestEquality:
    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (MAP(temperature=2), MAP(temperature=2.0)),
            (Everything([1, 2]), Everything((1, 2))),
            (Everything({"a": 1, "b": 2}), Everything({"b": 2, "a": 1})),
            (Everything(torch.ones(3)), Everything(torch.ones(3))),
            (Everything(np.int64(4)), Everything(4)),
            (Everything(float("nan")), Everything(float("nan"))),
            (Everything(0, inner=Gaussian(noise=1)), Everything(0, inner=Gaussian(noise=1.0))),
        ],
    )
    def test_equal_values_are_equal_and_hash_alike(self, left: Setting, right: Setting) -> None:
        assert left == right
        assert hash(left) == hash(right)
        assert len({left, right}) == 1

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (MAP(), MAP(train=False)),
            (MAP(), Child()),
            (MAP(), "MAP()"),
            (Everything(torch.ones(3)), Everything(torch.ones(3, dtype=torch.float64))),
            (Everything(torch.ones(3)), Everything(torch.ones(3, 1))),
            (Everything(torch.zeros(3)), Everything(-torch.zeros(3))),
            (Everything(1), Everything("1")),
            (Everything(1), Everything(1 + 1e-15)),
            (Everything(float("inf")), Everything(-float("inf"))),
        ],
    )
    def test_different_values_differ(self, left: Setting, right: Any) -> None:
        assert left != right

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex64])
    def test_the_digest_sees_every_element_of_every_type(self, dtype: torch.dtype) -> None:
        tensor = torch.zeros(3, 4, dtype=dtype)
        seen = {digest(tensor), digest(tensor.t()), digest(tensor[:0]), digest(tensor[0, 0])}
        for index in range(12):
            changed = tensor.clone()
            changed.view(-1)[index] = 1
            seen.add(digest(changed))
            assert digest(changed) == digest(changed.t().contiguous().t())  # the memory layout does not matter
        assert len(seen) == 16

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            MAP().train = False  # type: ignore[misc]

    def test_replace_and_changed_fields(self) -> None:
        changed = MAP(train=False).replace(temperature=2.0)
        assert changed == MAP(train=False, temperature=2.0)
        assert changed.changed_fields() == {"train": False, "temperature": 2.0}
        assert Everything(5).changed_fields() == {"required": 5}

    def test_what_cannot_be_held_says_so(self) -> None:
        with pytest.raises(InputError, match="cannot hold a object"):
            repr(Everything(object()))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class TestJson:
    @pytest.mark.slow
    @settings(deadline=None)  # the first look at a name imports every module
    @given(required=values, number=st.floats(allow_nan=False), text=st.text())
    def test_round_trip_of_plain_values(self, required: Any, number: float, text: str) -> None:
        value = Everything(required, number=number, text=text, inner=Everything(required))
        assert round_trip(value) == value
        assert repr(round_trip(value)) == repr(value)
        assert hash(round_trip(value)) == hash(value)

    def test_round_trip_of_tensors_types_and_settings(self) -> None:
        mask = torch.tensor([True, False])
        value = Everything({"w": mask}, tensor=torch.tensor(3.5, dtype=torch.float64), inner=MAP(), kind=nn.Conv2d)
        again = round_trip(value)
        assert again == value
        assert again.kind is nn.Conv2d
        assert torch.equal(again.required["w"], mask)
        assert again.tensor.dtype == torch.float64

    def test_types_of_the_user_come_back_if_their_module_is_loaded(self) -> None:
        assert round_trip(Everything(0, kind=Layer.Inner)).kind is Layer.Inner

    @pytest.mark.parametrize("name", ["not_loaded:Thing", "torch:load", "torch.nn:Nothing", "os:system"])
    def test_a_type_must_be_one_and_be_loaded(self, name: str) -> None:
        written = {**Everything(0).to_json(), "kind": {"$type": name}}
        with pytest.raises(InputError, match="import the module"):
            Setting.from_json(written)

    def test_a_missing_tensor_says_so(self) -> None:
        with pytest.raises(InputError, match="missing beside its JSON"):
            Setting.from_json(Everything(torch.ones(2)).to_json())

    def test_an_unknown_field_is_not_dropped(self) -> None:
        with pytest.raises(InputError, match="MAP has no field 'colour'"):
            Setting.from_json({**MAP().to_json(), "colour": 3})

    def test_something_unreadable_says_so(self) -> None:
        with pytest.raises(InputError, match="entry with unknown keys"):
            Setting.from_json({"$nothing": 1})

    def test_an_object_that_is_not_saved_keeps_its_place_and_its_comparison(self) -> None:
        value = Everything(Absent("abc"))
        assert round_trip(value) == value
        assert round_trip(value) != Everything(Absent("abd"))

    def test_defaults_that_are_absent_are_filled_in(self) -> None:
        assert Setting.from_json({"$setting": "MAP"}) == MAP()


class TestFind:
    @pytest.mark.parametrize("name", ["MAP", "map", "Map"])
    def test_case_does_not_matter(self, name: str) -> None:
        assert find(name) is MAP

    @pytest.mark.parametrize("name", ["likelihoods.heteroscedastic_gaussian", "likelihoods.Heteroscedastic-Gaussian"])
    def test_neither_do_hyphens_and_underscores(self, name: str) -> None:
        assert find(name).__name__ == "HeteroscedasticGaussian"

    def test_a_name_without_prefix_is_found_where_it_is_unique(self) -> None:
        assert find("gaussian") is Gaussian
        assert find("everything") is Everything

    def test_the_namespace_comes_first(self) -> None:
        assert find("gaussian", "likelihoods") is Gaussian
        assert find("twin", "testing") is First
        assert find("twin", "elsewhere") is Second
        assert find("map", "likelihoods") is MAP

    def test_an_ambiguous_name(self) -> None:
        with pytest.raises(InputError, match=r"'twin' is ambiguous: write one of elsewhere\.Twin, testing\.Twin"):
            find("twin")

    def test_an_unknown_name_lists_what_there_is(self) -> None:
        with pytest.raises(InputError, match=r"no setting called 'bayes'; known here: .*MAP.*Training"):
            find("bayes")
        with pytest.raises(InputError, match=r"known here: .*likelihoods\.Gaussian") as error:
            find("bayes", "likelihoods")
        assert "MAP" not in str(error.value)

    def test_a_subclass_without_a_name_is_not_taken_for_its_parent(self) -> None:
        assert find("MAP") is MAP
        with pytest.raises(InputError, match="no setting called 'Child'"):
            round_trip(Child())


def test_canonical_text_is_stable() -> None:
    assert canonical(MAP()) == canonical(MAP(prior_precision=0))
    assert json.loads(canonical(Everything((1.0, True, None)))) == {
        "$setting": "testing.Everything",
        "required": {"$tuple": [1, True, None]},
        "number": 1,
        "text": "plain",
        "many": {"$tuple": []},
        "table": {"$dict": []},
        "tensor": None,
        "inner": None,
        "kind": None,
    }


class TestChecks:
    """Every field is checked against its annotation, and the error says what is allowed and what was given."""

    @pytest.mark.parametrize(
        ("kind", "value", "message"),
        [
            (Count, 0, "`x` must be a whole number of at least 1, got 0."),
            (Count, True, "`x` must be a whole number of at least 1, got True."),
            (Count, 3.0, "`x` must be a whole number of at least 1, got 3.0."),
            (Positive, math.nan, "`x` must be a positive number, got nan."),
            (Positive, math.inf, "`x` must be a positive number, got inf."),
            (float, math.nan, "`x` must be a number, got nan."),
            (Probability | None, 1.5, "`x` must be a number from 0 to 1 or None, got 1.5."),
            (Share, 1, "`x` must be a number of at least 0 and below 1, got 1."),
            (OpenProbability, 0, "`x` must be a number above 0 and below 1, got 0."),
            (Start, "frehs", "`x` must be 'model', 'fresh' or 'head', got 'frehs'. Did you mean 'fresh'?"),
            (Positive | Literal["auto"], -1, "`x` must be a positive number or 'auto', got -1."),
            (bool | Literal["auto"], 1, "`x` must be True, False or 'auto', got 1."),
            (tuple[Positive, Positive], (1, -1), "`x` must be a tuple of 2, each a positive number, got (1, -1)."),
            (Mapping[str, Positive], {"a": 0}, "`x` must be a dict, each value a positive number, got {'a': 0}."),
            (
                PositiveValue,
                torch.tensor([1.0, -2.0]),
                "`x` must be a positive number or a positive tensor, got a tensor of shape (2,), values from -2 to 1.",
            ),
        ],
    )
    def test_the_error_says_what_is_allowed_and_given(self, kind: Any, value: Any, message: str) -> None:
        with pytest.raises(InputError) as caught:
            check("x", kind, value)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (Count, np.int64(3)), (Positive, np.float32(0.5)), (Positive, 2), (float, math.inf), (bool, np.bool_(True)),
            (Positive | Literal["auto"], "auto"), (tuple[float, ...], ()), (Mapping[str, Positive], {"a": 1}),
        ],
    )  # fmt: skip
    def test_what_is_accepted(self, kind: Any, value: Any) -> None:
        check("x", kind, value)

    def test_every_annotation_of_ours_can_be_evaluated(self) -> None:
        """A name that only type checkers see would leave its field unchecked."""
        load_all()
        for cls in subclasses(Setting):
            for name, kind in kinds_of(cls).items() if cls.__module__.startswith("dubito") else ():
                home = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
                assert kind is not Any or inspect.get_annotations(home)[name] == "Any", f"{cls.__name__}.{name}"

    def test_defaults_are_allowed(self) -> None:
        for cls in subclasses(Setting):
            for one in dataclasses.fields(cls) if cls.__module__.startswith("dubito") else ():
                if one.default is not dataclasses.MISSING:
                    check(one.name, kinds_of(cls)[one.name], one.default)

    def test_a_list_becomes_a_tuple(self) -> None:
        assert priors.ScaleMixture([1.0, 0.1]).scales == (1.0, 0.1)


def subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


@setting
class Renamed(Setting):
    setting_name = "testing.Renamed"
    old_fields: ClassVar[Mapping[str, str]] = {"samples": "num_samples"}
    old_values: ClassVar[Mapping[str, Mapping[str, str]]] = {"shape": {"lowrank": "low-rank"}}
    num_samples: Count = 8
    shape: Literal["full", "low-rank"] = "full"


class TestOldSpellings:
    def test_they_work_and_name_the_new_one(self) -> None:
        with pytest.warns(
            DeprecationWarning, match=r"Renamed\(samples=...\) is the old spelling: write num_samples="
        ) as one:
            found = Renamed(samples=3)  # type: ignore[call-arg]
        assert found == Renamed(num_samples=3)
        assert one[0].filename == __file__
        with pytest.warns(DeprecationWarning, match="'lowrank'.* write shape='low-rank'"):
            assert Renamed(shape="lowrank").shape == "low-rank"  # type: ignore[arg-type]
        with pytest.warns(DeprecationWarning, match="write num_samples="):
            assert Renamed().replace(samples=2) == Renamed(2)
        with pytest.warns(DeprecationWarning, match="write num_samples="):
            assert Renamed(5).samples == 5  # type: ignore[attr-defined]
        with pytest.warns(DeprecationWarning, match="write num_samples="):
            assert parse("testing.renamed(samples=4)") == Renamed(4)

    def test_old_files_are_read_in_silence(self) -> None:
        saved = {"$setting": "testing.Renamed", "samples": 3, "shape": "lowrank"}
        assert Setting.from_json(saved) == Renamed(3, "low-rank")

    def test_other_names_are_still_wrong(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'sample'"):
            _ = Renamed().sample  # type: ignore[attr-defined]
        with pytest.raises(InputError, match="'sample'; its arguments are num_samples, shape"):
            Renamed(sample=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda: Laplace(structure="lowrank"), Laplace(structure="low-rank")),
        (lambda: SWAG(samples=3), SWAG(num_samples=3)),
        (lambda: BatchNormNoise(samples=3), BatchNormNoise(num_samples=3)),
        (lambda: select.subnetwork(5, samples=3), select.subnetwork(5, num_samples=3)),
        (lambda: Rank1(prior=None, posterior="delta"), Rank1(prior=None, family="delta")),
    ],
)
def test_old_spellings_of_public_arguments(old: Any, new: Setting) -> None:
    with pytest.warns(DeprecationWarning, match="is the old spelling: write"):
        assert old() == new
