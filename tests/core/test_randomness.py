"""Ours and theirs: draws inside a stream continue it and leave the global generators as they were."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dubito.core.randomness import (
    Stream,
    default_generator,
    derive_seed,
    draw_seed,
    normal_like,
    restoring_generators,
)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), (name, keys.tolist(), *rest)


@pytest.mark.parametrize("libraries", [False, True])
def test_a_stream_is_one_timeline_whatever_happens_outside(libraries: bool) -> None:
    kept = slice(0, 3 if libraries else 1)
    whole, parts = Stream(5, libraries=libraries), Stream(5, libraries=libraries)
    with whole.active():
        expected = [draw()[kept] for _ in range(4)]
    found = []
    for _ in range(4):
        draw()
        with parts.active():
            found.append(draw()[kept])
    assert found == expected


def test_the_global_generators_do_not_notice() -> None:
    before = states()
    with Stream(1, libraries=True).active():
        draw()
    assert states() == before


def test_not_even_after_an_error() -> None:
    def fail() -> None:
        draw()
        raise RuntimeError

    before = states()
    with pytest.raises(RuntimeError), Stream(1, libraries=True).active():
        fail()
    assert states() == before


def test_restoring_does_not_touch_the_stream_of_another_thread() -> None:
    """A fit that ended in one thread reset the draws of a fit in another."""
    inside, goes_on, found, before = threading.Event(), threading.Event(), [], torch.get_rng_state()

    def draw_twice() -> None:
        with Stream(1).active():
            found.append(torch.rand(()).item())
            inside.set()
            goes_on.wait(10)
            found.append(torch.rand(()).item())

    def restore() -> None:
        with restoring_generators():
            pass

    threads = [threading.Thread(target=target) for target in (draw_twice, restore)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # it waits for the stream
    goes_on.set()
    for thread in threads:
        thread.join(10)
    with Stream(1).active():
        assert found == [torch.rand(()).item() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_and_streams_differ() -> None:
    values = set()
    for seed in range(5):
        with Stream(seed, libraries=True).active():
            values.add(draw())
    assert len(values) == 5


def test_derived_seeds_are_a_pure_function_of_the_path() -> None:
    seeds = {derive_seed(s, *path) for s in (0, 1) for path in [(), ("a",), ("b",), ("a", 0), ("a", 1), ("a", 1, 1)]}
    assert len(seeds) == 12
    # Another number here would mean that a run cannot go on from the checkpoint of an earlier version.
    assert derive_seed(3, "loader", 7) == 7334880540533398122
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_default_generator_is_seeded_and_a_given_one_is_kept(generator: torch.Generator) -> None:
    assert default_generator(generator) is generator
    assert draw_seed(default_generator(None)) == draw_seed(default_generator(None))
    assert draw_seed(generator) != draw_seed(generator)


@pytest.mark.parametrize("like", [
    torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(6, 4).mT,
    torch.zeros(3, 1).expand(3, 7), torch.zeros(8, 6)[:, ::2],
], ids=["plain", "channels last", "transposed", "expanded", "with gaps"])  # fmt: skip
def test_normal_noise_has_the_layout_of_its_tensor(like: torch.Tensor) -> None:
    torch.manual_seed(0)
    noise = normal_like(like)
    torch.manual_seed(0)
    expected = torch.randn(like.numel())
    assert noise.shape == like.shape
    assert noise.stride() == torch.empty_like(like).stride()
    assert torch.equal(noise.as_strided((like.numel(),), (1,)), expected)  # every element once, in the order of memory
