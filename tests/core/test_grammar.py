"""Text becomes settings: what a setting prints is read back, and bad text is refused in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import pytest
from dubito.errors import InputError
from dubito.likelihoods import Categorical, Gaussian
from hypothesis import given
from hypothesis import strategies as st

import dubito
from dubito.core.grammar import parse, read_call
from dubito.core.settings import Setting, setting
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP
from dubito.networks.selection import Selection
from dubito.select.rule import SelectionRule


@setting
class Box(Setting):
    setting_name = "grammar.Box"
    content: Any = None
    other: Any = 0
    table: Mapping[Any, Any] = field(default_factory=dict)


@setting
class Some(SelectionRule):
    setting_name = "grammar.some"
    size: int

    def resolve(self, *args: Any, **kwargs: Any) -> Selection:
        raise NotImplementedError


def read(text: str) -> Any:
    """Return the setting, or None where the text is refused; any other error is one of ours."""
    try:
        return parse(text)
    except InputError:
        return None


def setting_or_words(text: str) -> Any:
    """Return the setting, or what is said about a text that is none."""
    try:
        return parse(text)
    except InputError as error:
        return str(error)


class TestGood:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("map", MAP()),
            (" MAP ( ) ", MAP()),
            ("map(temperature=validation)", MAP(temperature="validation")),
            ("map(temperature='validation', train=False)", MAP(temperature="validation", train=False)),
            ("map(2.5, train=false)", MAP(2.5, train=False)),
            ("map(prior_precision=1e-3,)", MAP(prior_precision=0.001)),
            ("training(clip=none, epochs=3)", Training(epochs=3)),
            ("likelihoods.gaussian(noise=0.1)", Gaussian(noise=0.1)),
            ("categorical(ignore_index=-1)", Categorical(ignore_index=-1)),
            ("grammar.box(output-variance)", Box("output-variance")),
            ("grammar.box(lenet-5, other=a.b)", Box("lenet-5", other="a.b")),
            ("box([1, 2.0, -inf])", Box((1, 2.0, -float("inf")))),
            ("box((1,), {'a b': [none, true]})", Box((1,), {"a b": (None, True)})),
            ("box(map(train=false), other=box(box()))", Box(MAP(train=False), other=Box(Box()))),
            ("box('with (brackets), = and \\'quotes\\'')", Box("with (brackets), = and 'quotes'")),
            ("box(gaussian(0.5))", Box(Gaussian(0.5))),
            ("gram-mar.b-o-x(1)", Box(1)),
        ],
    )
    def test_reads(self, text: str, value: Setting) -> None:
        assert parse(text) == value

    def test_numbers_keep_their_kind(self) -> None:
        content = parse("box([1, 1.0, -2, +3, .5, 1e3])").content
        assert [type(number) for number in content] == [int, float, int, int, float, float]
        assert list(content) == [1, 1.0, -2, 3, 0.5, 1000.0]

    def test_the_public_name(self) -> None:
        assert dubito.parse("map(train=false)") == MAP(train=False)

    def test_the_argument_says_where_to_look(self) -> None:
        assert parse("gaussian(0.5)", "likelihoods") == Gaussian(0.5)

    def test_selections_are_joined_as_in_python(self) -> None:
        a, b, c = Some(1), Some(2), Some(3)
        assert parse("box(some(1) | some(2) & some(3))") == Box(a | b & c)
        assert parse("box((some(1) | some(2)) & some(3))") == Box((a | b) & c)
        assert parse("box(~(some(1) | ~some(2)))") == Box(~(a | ~b))

    def test_a_call_is_read_without_making_a_setting_of_it(self) -> None:
        assert read_call("mlp(hidden=[5, 5], activation=tanh)") == ("mlp", [], {"hidden": [5, 5], "activation": "tanh"})
        assert read_call("lenet-5") == ("lenet-5", [], {})
        assert read_call("resnet20(1)") == ("resnet20", [1], {})


class TestBad:
    @pytest.mark.parametrize(
        "text",
        [
            *("", "  ", "(", "map(", "map)", "map(train=)", "map(=1)", "map(,)", "map() map()", "map(train=false, 3)"),
            *("1", "map(train==false)", "'map'", "map(train='x)", "\0", "map(a=1;b=2)", "map(train=fal$e)", "map\nmap"),
            *("[map]", "map.", ".map", "map(train=false"),
        ],
    )
    def test_what_is_not_a_call(self, text: str) -> None:
        with pytest.raises(InputError, match=r"^Cannot read '") as error:
            parse(text)
        assert "\n" not in str(error.value).replace(text, "")

    @pytest.mark.parametrize(
        "text",
        [
            *("box(lambda: 1)", "box(1 + 1)", "box(x if y else z)", "box(b'x')", "box(1j)", "box(f'{1}')", "box(...)"),
            *("box({1, 2})", "box({**{}})", "box({[1]: 2})", "box({map(): 2})", "box(*[1])", "box(**{})", "box(a[0])"),
            *("box(1-2)", "box(-kron)", "box(not-a)", "box([i for i in x])", "box(x := 1)", "box()()"),
            *("box(().__class__)", "box(__import__('os').system('true'))"),
        ],
    )
    def test_python_that_is_not_a_literal_is_refused(self, text: str) -> None:
        with pytest.raises(InputError, match=r"^Cannot read '"):
            parse(text)

    @pytest.mark.parametrize("depth", [150, 100_000])
    @pytest.mark.parametrize(("start", "end"), [("box(", ")"), ("~", ""), ("-", ""), ("[", "]")])
    def test_deep_nesting_neither_crashes_nor_hangs(self, start: str, end: str, depth: int) -> None:
        text = f"box({start * depth}1{end * depth})"
        assert (read(text) is None) or depth < sys.getrecursionlimit()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("map(colour=red)", "MAP takes no argument 'colour'; its arguments are prior_precision, temperature"),
            (
                "categorical(1, 2, 3)",
                "likelihoods.Categorical takes at most 2 arguments; its arguments are ignore_index",
            ),
            ("grammar.some()", "grammar.some: missing a required argument: 'size'; its arguments are size"),
            ("map(2, prior_precision=3)", "MAP: .*multiple values"),
            ("map(train=false, train=true)", "give each argument once"),
            ("mop", "no setting called 'mop'"),
            ("box(nothing(1))", "no setting called 'nothing'"),
            ("map(temperature=hot)", "`temperature` must be a positive number or 'validation', got 'hot'"),
            ("box(some(1) | kron)", "join selections, each written as a call"),
            ("box(map() | map())", "join selections, each written as a call"),
            ("box(~1)", "join selections, each written as a call"),
        ],
    )
    def test_one_clear_sentence(self, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            parse(text)


plain = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8)
rules = st.recursive(
    st.builds(Some, st.integers(0, 9)),
    lambda inner: (
        st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a: ~a, inner)
    ),
    max_leaves=5,
)
contents = st.recursive(
    plain | rules,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Box, inner, inner)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(contents, contents, st.dictionaries(st.text(max_size=3) | st.integers(), contents, max_size=2))
def test_what_a_setting_prints_is_read_back(content: Any, other: Any, table: dict[Any, Any]) -> None:
    box = Box(content, other, table)
    assert parse(repr(box)) == box
    assert repr(parse(repr(box))) == repr(box)


@given(st.text(max_size=40) | st.text(alphabet="box()[]{}=,'\"~|&-.:1e*_ ", max_size=40))
def test_any_text_gives_a_setting_or_one_sentence(text: str) -> None:
    found = setting_or_words(text)
    assert isinstance(found, Setting) or len(found.splitlines()) == 1
