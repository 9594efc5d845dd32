"""Few bits per weight: what rounding costs, who gets the bits, and a size that removing and rounding share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from compression_cases import table
from dubito.compression import Budget, compress
from dubito.errors import InputError
from torch import Tensor, nn

from dubito import MAP, Laplace, Posterior, Training, compression, rules
from dubito.uses.compression.budget import ROUNDINGS
from dubito.uses.compression.search import score_of
from extras import needs

DATA, HELD_OUT = table(), table(1)


@cache
def posterior() -> Posterior:
    torch.manual_seed(0)
    sizes = DATA[0].shape[1], int(DATA[1].max()) + 1
    model = nn.Sequential(nn.Linear(sizes[0], 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, sizes[1]))
    trained = MAP().fit(model, DATA, training=Training(epochs=20, lr=0.01), progress=False)
    return Laplace(prior_precision=1.0).fit(trained.model, DATA, progress=False)


def steps(weight: Tensor, bits: int) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_cost_is_that_of_the_closed_form(bits: int) -> None:
    made = compress(posterior(), rules.Magnitude(0.0))
    found, precision = made.quantized(bits), posterior().precision_diagonal()
    nats = off = 0.0
    for name in found.bits:
        before, after = made.model.get_parameter(name).detach(), found.model.get_parameter(name).detach()
        step = steps(before, bits)
        assert ((before - after).abs() <= 0.5001 * step).all()
        torch.testing.assert_close(after / step, (after / step).round(), atol=1e-3, rtol=0)
        nats += float((precision[name] * step.square()).sum()) / 24
        off += float((precision[name] * (before - after).square()).sum()) / 2
    assert found.nats * len(DATA[0]) == pytest.approx(nats, rel=1e-5)
    assert off <= 3 * nats  # an error is at most half a step, three times the mean square
    assert torch.equal(found.model.get_parameter("0.bias"), made.model.get_parameter("0.bias"))


def test_precise_weights_get_more_bits() -> None:
    made = compress(posterior(), rules.Magnitude(0.0))
    low, high = made.quantized(4), made.quantized(8)
    assert set(made.quantized(rounding=2 * low.nats).bits.values()) == {4}
    assert set(made.quantized(rounding=1e-12).bits.values()) == {8}
    allowed = 0.5 * low.nats
    some = made.quantized(rounding=allowed)
    assert set(some.bits.values()) == {4, 8}
    assert some.nats <= allowed
    assert low.num_bytes < some.num_bytes < high.num_bytes
    coarse = made.quantized(4, by_channel=False)
    assert coarse.nats >= low.nats


def test_units_that_went_have_no_precision() -> None:
    made = compress(posterior(), rules.Magnitude(0.5, scope="layer"), structure="units", data=HELD_OUT)
    nats = 0.0
    for name, precision in posterior().precision_diagonal().items():
        if name in made.plan.keep:
            weight = made.model.get_parameter(name).detach()
            left = precision[made.plan.keep[name]].reshape(weight.shape)
            nats += float((left * steps(weight, 4).square()).sum()) / 24
    assert made.quantized(4).nats * len(DATA[0]) == pytest.approx(nats, rel=1e-5)


@pytest.mark.slow
def test_a_size_is_shared_between_removing_and_rounding(tmp_path: Path) -> None:
    whole = compress(posterior(), rules.Magnitude(0.0)).save(tmp_path / "whole")
    budget = Budget(size=int(0.5 * whole))
    made = compress(posterior(), budget=budget, data=HELD_OUT)
    assert made.rounding in ROUNDINGS
    assert made.save(tmp_path / "small") <= 0.5 * whole
    score = score_of(posterior(), HELD_OUT)
    small = score(compression.load(tmp_path / "small", made.dense))
    within = [each for each in made.candidates if each.num_bytes is not None and each.num_bytes <= 0.5 * whole]
    assert score(made.dense) - small == pytest.approx(min(each.error for each in within if each.error is not None))
    assert len({each.rounding for each in made.candidates}) == len(ROUNDINGS)


def test_a_file_of_8_bits_gives_nearly_the_same_outputs(tmp_path: Path) -> None:
    runtime = needs("onnxruntime")
    needs("onnx")
    model = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 3))
    data = torch.randn(30, 40), torch.arange(30) % 3
    made = compress(MAP(train=False).fit(model, data, progress=False), rules.Magnitude(0.0), data=data)
    plain, small = made.export(tmp_path / "plain.onnx"), made.export(tmp_path / "small.onnx", int8=True)
    assert small.num_bytes < 0.4 * plain.num_bytes
    session = runtime.InferenceSession(str(small.path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {small.inputs[0]: data[0].numpy()})
    expected = made.model(data[0]).detach()
    difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    assert 0 < difference <= 0.1
    assert difference == pytest.approx(small.difference, abs=1e-3)


def test_a_file_of_few_bits_holds_the_rounded_network(tmp_path: Path) -> None:
    """Convolutions, matrices and their transposes, an odd number of weights; 4 and 8 bits in one file."""
    runtime = needs("onnxruntime")
    onnx = needs("onnx")
    model = nn.Sequential(
        nn.Conv2d(1, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7 * 36, 61), nn.ReLU(), nn.Linear(61, 3)
    )
    data = torch.randn(30, 1, 8, 8), torch.arange(30) % 3
    made = compress(Laplace(structure="diag").fit(model, data, progress=False), rules.Magnitude(0.0), data=data)
    plain = made.export(tmp_path / "plain.onnx")
    for bits, most in ((4, 0.2), (8, 0.32), ("posterior", 0.32)):
        few = made.quantized(None if bits == "posterior" else bits)
        small = made.export(tmp_path / "small.onnx", bits=bits)
        assert small.num_bytes < most * plain.num_bytes
        graph = onnx.load(small.path).graph
        kinds = [each.data_type for each in graph.initializer]
        assert kinds.count(onnx.TensorProto.INT4) == [*few.bits.values()].count(4)
        assert kinds.count(onnx.TensorProto.INT8) == [*few.bits.values()].count(8)
        session = runtime.InferenceSession(str(small.path), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {small.inputs[0]: data[0].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), few.model(data[0]).detach(), rtol=1e-4, atol=1e-5)
        expected = made.model(data[0]).detach()
        difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        assert difference == pytest.approx(small.difference, abs=1e-5)


def test_bad_bits_are_one_sentence() -> None:
    made = compress(posterior(), rules.Magnitude(0.0))
    with pytest.raises(InputError, match=r"`bits`.*got 1"):
        made.quantized(1)
    with pytest.raises(InputError, match=r"\.onnx files only"):
        made.export("net.pt2", example=DATA[0][:4], int8=True)
    with pytest.raises(InputError, match=r"`bits`.*got 5"):
        made.export("net.onnx", example=DATA[0][:4], bits=5)
    with pytest.raises(InputError, match="not both"):
        made.export("net.onnx", example=DATA[0][:4], bits=4, int8=True)
