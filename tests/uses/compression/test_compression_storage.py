"""Files: what is written comes back, real sizes, bit widths, and files that are damaged."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from compression_cases import CHAINS, GRAPHS, build, fit, needs_graph, point, table
from dubito.compression import compress, load, save
from dubito.errors import FileFormatError, InputError, UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dubito import Laplace, rules
from dubito.uses.compression import coding, quantize, storage
from dubito.uses.compression.csr import SparseLinear, break_even, faster_layers
from dubito.uses.compression.weight_statistics import precision_diagonal
from extras import needs


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.just(0), st.just(0), st.integers(-32767, 32767)), max_size=2000), st.integers(0, 700))
def test_integers_come_back(numbers: list[int], zeros: int) -> None:
    content = np.array([0] * zeros + numbers, dtype=np.int32)
    gaps, values = coding.encode(content)
    gaps, values = (coding.unpack(coding.pack(part), len(part)) for part in (gaps, values))
    assert np.array_equal(coding.decode(gaps, values, len(content)), content)


def test_the_coder_is_near_the_entropy() -> None:
    """8,000 of 260,000 weights in about 30 levels: no more than 8 % above what is possible."""
    random = np.random.default_rng(0)
    numbers = np.zeros(260_000, dtype=np.int32)
    numbers[random.choice(len(numbers), 8_000, replace=False)] = np.rint(random.laplace(0, 4, 8_000)) * 2 + 1
    _, counts = np.unique(numbers, return_counts=True)
    shares = counts / counts.sum()
    entropy = -(shares * np.log2(shares)).sum() * len(numbers) / 8
    size = sum(len(coding.pack(part)) for part in coding.encode(numbers))
    assert entropy < size < 1.08 * entropy


@pytest.mark.parametrize("kind", [*CHAINS, *GRAPHS])
@pytest.mark.parametrize("format", ["dense", "csr", "coded"])
def test_a_file_loads_into_the_original_architecture(kind: str, format: storage.Format, tmp_path: Path) -> None:
    needs_graph(kind)
    model, x = build(kind)
    made = compress(point(model), rules.Magnitude(0.5, scope="layer"), structure="units", example=x)
    size = made.save(tmp_path / "net", format=format)
    assert size == (tmp_path / "net").stat().st_size
    found = load(tmp_path / "net", model)
    assert type(found) is type(model)
    assert [p.shape for p in found.parameters()] == [p.shape for p in made.model.parameters()]
    pairs = zip(found.parameters(), made.model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    steps = made.steps()
    assert difference <= (0.0 if format != "coded" else 0.5001 * max(steps.values()))
    assert all(torch.equal(a, b) for a, b in zip(found.buffers(), made.model.buffers(), strict=True))


def test_layers_of_unchanged_size_load_as_they_are(tmp_path: Path) -> None:
    """The weight of a LayerNorm over two axes, and of a grouped transposed convolution, has no axis of all outputs."""
    model = nn.Sequential(nn.ConvTranspose1d(4, 4, 2, groups=2), nn.LayerNorm((4, 5)), nn.Flatten(), nn.Linear(20, 3))
    save(tmp_path / "net", model)
    found = load(tmp_path / "net", model)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_sparse_files_are_smaller(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = compress(point(nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 10))), rules.Magnitude(0.98))
    dense, csr, coded = (made.save(tmp_path / f, format=f) for f in ("dense", "csr", "coded"))  # type: ignore[arg-type]
    assert dense > 12 * csr > 36 * coded


def test_shared_weights_are_written_exactly_by_a_codebook(tmp_path: Path) -> None:
    """Sixteen values, 93 % of them zero: a few tenths of a bit per weight, and not one of them is changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    centres = torch.cat([torch.zeros(1), torch.randn(15)])
    with torch.no_grad():
        for layer in (model[0], model[2]):
            number = torch.randint(1, 16, layer.weight.shape) * (torch.rand(layer.weight.shape) < 0.07)
            layer.weight.copy_(centres[number])
    size = save(tmp_path / "net", model)
    assert size < 0.75 * 62_000 / 8 + 4 * 210
    found = load(tmp_path / "net", model)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_the_step_costs_what_it_says() -> None:
    """The mean of ½ Σ P e² over rounding errors e of many weights is Σ P Δ² / 24."""
    precision = {"w": torch.rand(4000, dtype=torch.float64) * 300 + 50}
    mean = {"w": torch.randn(4000, dtype=torch.float64)}
    step = quantize.steps(mean, precision, {}, num_data=50_000, loss=0.001)["w"]
    error = quantize.rounded(mean["w"], step) * step - mean["w"]
    cost = 0.5 * float((precision["w"] * error.square()).sum())
    assert cost == pytest.approx(50_000 * 0.001, rel=0.05)
    assert step < float(precision["w"].mean().rsqrt())


def test_a_step_follows_the_standard_deviation_and_not_the_variance() -> None:
    """In another unit of the weights the step is the same number of them, and the bits are the same."""
    torch.manual_seed(0)
    mean, scale = torch.randn(500), torch.rand(500) * 0.1 + 0.02
    steps = [
        quantize.steps({"w": unit * mean}, {"w": (unit * scale) ** -2.0}, {}, num_data=10**6, loss=1.0)["w"] / unit
        for unit in (1.0, 1000.0)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)
    assert quantize.bits(mean, steps[0]) == quantize.bits(1000 * mean, 1000 * steps[1])
    assert steps[0] == pytest.approx(float(scale.double().pow(-2).mean().rsqrt()), rel=1e-5)
    assert quantize.bits(mean, steps[0]) == 1 + math.ceil(math.log2(round(float(mean.abs().max()) / steps[0]) + 1))


def test_only_weights_that_stay_set_the_step() -> None:
    precision = {"w": torch.tensor([1.0, 1e6])}
    step = quantize.steps({"w": torch.tensor([1.0, 0.0])}, precision, {"w": torch.tensor([True, False])}, 10**6, 1.0)
    assert step == {"w": 1.0}


def test_a_network_can_be_compressed_twice() -> None:
    """Weights that an earlier compression removed do not count as weights without a posterior."""
    first = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    again = compress(first.posterior(Laplace(structure="diag", prior_precision=1.0), table()), rules.Magnitude(0.0))
    assert again.plan.num_kept == again.plan.num_weights
    precision = precision_diagonal(again.source, ["0.weight"])["0.weight"]
    assert again.steps(rounding=100.0)["0.weight"] == pytest.approx(
        float(precision[precision > 0].mean().rsqrt()), rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["variational", "diag", "kron"])
def test_rounding_hardly_changes_a_network(kind: str, tmp_path: Path) -> None:
    report = compress(fit(kind), rules.SignalToNoise(target=0.2), data=table()).report(seconds=0.001)
    assert report.scores["coded"]["nll"] == pytest.approx(report.scores["after"]["nll"], abs=0.02)


def test_damaged_files(tmp_path: Path) -> None:
    model, _ = build("mlp")
    made = compress(point(model), rules.Magnitude(0.5))
    made.save(tmp_path / "net")
    content = (tmp_path / "net").read_bytes()
    for damage in (content[:-3], content[:30] + b"x" + content[31:], content[:10]):
        (tmp_path / "bad").write_bytes(damage)
        with pytest.raises(FileFormatError, match=r"truncated|altered"):
            load(tmp_path / "bad", model)
    with pytest.raises(FileFormatError, match="no file"):
        load(tmp_path / "none", model)
    with pytest.raises(FileFormatError, match="another network"):
        load(tmp_path / "net", build("no bias")[0])
    with pytest.raises(InputError, match="'dense', 'csr' or 'coded'"):
        made.save(tmp_path / "net", format="zip")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`rounding` must be a positive number"):
        made.save(tmp_path / "net", rounding=0.0)


def test_sparse_rows_compute_the_same() -> None:
    dense = nn.Linear(40, 30)
    with torch.no_grad():
        dense.weight.mul_(torch.rand(30, 40) > 0.9)
    x = torch.randn(2, 5, 40)
    torch.testing.assert_close(SparseLinear(dense)(x), dense(x))
    plain = SparseLinear(nn.Linear(4, 3, bias=False))
    assert plain(torch.ones(2, 4)).shape == (2, 3)


def test_layers_become_sparse_rows_only_where_that_is_faster() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, 10))
    made = compress(point(model), rules.Magnitude({"0": 0.9995, "2": 0.0}), example=torch.randn(1, 900))
    found = made.sparse()
    assert [type(layer) for layer in found] == [SparseLinear, nn.ReLU, nn.Linear]
    torch.testing.assert_close(found(torch.ones(1, 900)), made.model(torch.ones(1, 900)))
    with pytest.raises(InputError, match="measured on one batch"):
        compress(point(model), rules.Magnitude(0.5)).sparse()
    assert isinstance(faster_layers(made.model, torch.ones(1, 900)), nn.Sequential)


def test_the_break_even_is_measured() -> None:
    ratios = break_even(200, 100, 8)
    assert list(ratios) == sorted(ratios)
    assert ratios[0.998] < ratios[0.5]


def test_int8() -> None:
    needs("torchao")
    made = compress(fit("diag"), rules.SignalToNoise(target=0.2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = made.int8()
        found = small(table()[0])
    assert (found - made.model(table()[0])).abs().max() < 0.05 * made.model(table()[0]).abs().max()
    assert [type(layer.weight).__name__ for layer in small if isinstance(layer, nn.Linear)] == ["Int8Tensor"] * 3
    assert all(type(value) is nn.Parameter for value in made.model.parameters())
    with pytest.raises(UnsupportedError, match="Only linear layers are stored in 8 bits"):
        quantize.int8(nn.Conv2d(1, 1, 1))
