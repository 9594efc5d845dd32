"""The settings of the loop: their ranges, and the learning rate they ask for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from dubito.errors import InputError
from hypothesis import given
from hypothesis import strategies as st

from dubito import Training


@pytest.mark.parametrize(
    "wrong",
    [
        *({"epochs": value} for value in (-1, 2.5, "ten", None, True)),
        *({"lr": value} for value in (0, -1e-3, math.nan, math.inf, "fast")),
        *({"batch_size": value} for value in (0, 2.5)),
        *({"optimizer": value} for value in ("lbfgs", None)),
        *({"momentum": value} for value in (-0.1, 1.0)),
        *({"weight_decay": value} for value in (-1.0, math.inf)),
        *({"schedule": value} for value in ("exponential", 3)),
        *({"warmup": value} for value in (-0.1, 1.0)),
        *({"clip": value} for value in (0.0, -1.0, "some")),
        *({"early_stopping": value} for value in (0, 1.5)),
        {"checkpoint_every": -1.0},
    ],
)
def test_a_setting_out_of_range(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=rf"^`{name}` must be .*, got "):
        Training(**wrong)


def test_a_checkpoint_may_be_a_path() -> None:
    assert Training(checkpoint=Path("a") / "b") == Training(checkpoint="a/b")


def test_what_decides_the_result() -> None:
    assert Training(checkpoint="a", checkpoint_every=3).identity() == Training(checkpoint="b").identity()
    assert Training(lr=1e-2).identity() != Training().identity()


def test_who_needs_validation_data() -> None:
    assert not Training().needs_validation
    assert Training(early_stopping=2).needs_validation
    assert Training(restore_best=True).needs_validation


class TestRate:
    @pytest.mark.parametrize(
        ("schedule", "rates"),
        [
            ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
            ("linear", [2.0, 1.5, 1.0, 0.5, 0.0]),
            ("cosine", [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
            ("step", [2.0, 2.0, 0.2, 0.02, 0.02]),
            ("hold", [2.0, 2.0, 2.0, 1.0, 0.0]),
        ],
    )
    def test_schedules(self, schedule: Any, rates: list[float]) -> None:
        training = Training(lr=2.0, schedule=schedule)
        assert [training.rate(i / 4) for i in range(5)] == pytest.approx(rates, abs=1e-15)

    @pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "hold", "step"])
    def test_warmup_rises_from_zero_and_then_the_schedule_begins(self, schedule: Any) -> None:
        training = Training(lr=2.0, schedule=schedule, warmup=0.2)
        assert [training.rate(p) for p in (0.0, 0.05, 0.1, 0.2)] == pytest.approx([0.0, 0.5, 1.0, 2.0])
        plain = Training(lr=2.0, schedule=schedule)
        assert training.rate(0.68) == pytest.approx(plain.rate(0.6))
        assert training.rate(1.0) == pytest.approx(plain.rate(1.0))

    @given(
        st.sampled_from(["constant", "linear", "cosine", "hold", "step"]),
        st.floats(0, 0.99),
        st.floats(0, 2),
    )
    def test_always_between_zero_and_the_peak(self, schedule: Any, warmup: float, progress: float) -> None:
        assert 0 <= Training(lr=0.1, schedule=schedule, warmup=warmup).rate(progress) <= 0.1
