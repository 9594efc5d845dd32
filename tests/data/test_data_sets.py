"""Loading by name: splits, statistics, shapes; on embedded sets and on tiny files in the layout of a data folder."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dubito.errors import FileFormatError, InputError, MissingDataError
from sklearn.datasets import load_diabetes, load_digits
from sklearn.preprocessing import StandardScaler
from tiny_files import write_idx, write_npz

import dubito.data
from dubito import data
from dubito.data.source import carve, fold_numbers


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(dubito.data.__path__)])
def test_examples_in_docstrings(module: str):
    assert doctest.testmod(importlib.import_module(f"dubito.data.{module}")).failed == 0


def rows_of(dataset: data.DataSet) -> set[bytes]:
    return {row.numpy().tobytes() for part in dataset.parts.values() for row in part[0]}


def test_digits_parts_and_statistics():
    digits = data.load("digits", validation=0)
    images, labels = load_digits(return_X_y=True)
    assert digits.task == "classification"
    assert (digits.num_outputs, digits.input_shape, digits.validation) == (10, (1, 8, 8), None)
    assert (len(digits.train[1]), len(digits.test[1])) == (1437, 360)
    inputs, targets = digits.train
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert abs(inputs.mean()) < 1e-5
    assert abs(inputs.std(correction=0) - 1) < 1e-5

    # The images are those of scikit-learn with their labels, once the standardisation is undone.
    known = {image.tobytes(): label for image, label in zip(images.astype(np.float32), labels, strict=True)}
    for pixels, target in (digits.train, digits.test):
        raw = (digits.encoder.decode(pixels) * 16).round().reshape(len(pixels), 64).numpy()
        assert [known[image.tobytes()] for image in raw] == target.tolist()


def test_digits_folds_partition_the_rows_and_are_stratified():
    folds = [data.load("digits", split=split, validation=0).test for split in range(5)]
    assert sum(len(targets) for _, targets in folds) == 1797
    counts = torch.stack([targets.bincount(minlength=10) for _, targets in folds])
    assert torch.equal(counts.sum(0), torch.as_tensor(np.bincount(load_digits().target)))
    assert (counts.amax(0) - counts.amin(0)).max() <= 1


def test_diabetes_equals_a_scikit_learn_pipeline():
    dataset = data.load("diabetes", split=2, validation=0)
    inputs, targets = load_diabetes(return_X_y=True, scaled=False)
    test = fold_numbers(np.zeros(442), 5) == 2
    scaler = StandardScaler().fit(inputs[~test])
    np.testing.assert_allclose(dataset.train[0], scaler.transform(inputs[~test]), atol=1e-6)
    np.testing.assert_allclose(dataset.test[0], scaler.transform(inputs[test]), atol=1e-6)
    loc, scale = dataset.target_scale
    np.testing.assert_allclose([loc.item(), scale.item()], [targets[~test].mean(), targets[~test].std()], rtol=1e-12)
    assert dataset.test[1].shape == (88, 1)
    np.testing.assert_allclose(dataset.target_scale.decode(dataset.test[1])[:, 0], targets[test], rtol=1e-5)
    assert dataset.feature_names[2] == "bmi"


def test_validation_is_carved_from_training_and_repeatable():
    whole = data.load("digits", validation=0)
    first, again = data.load("digits", validation=0.25), data.load("digits", validation=0.25)
    other = data.load("digits", validation=0.25, generator=torch.Generator().manual_seed(1))
    assert len(first.validation[1]) == round(0.25 * 1437)
    assert len(first.train[1]) + len(first.validation[1]) == 1437
    assert torch.equal(first.validation[0], again.validation[0])
    assert not torch.equal(first.validation[1], other.validation[1])
    assert torch.equal(first.test[1], whole.test[1])
    assert torch.equal(first.test[1], other.test[1])
    # Only the rows left for training make the statistics.
    assert abs(first.train[0].mean()) < 1e-5
    assert first.encoder.loc != whole.encoder.loc
    both = torch.cat([first.encoder.decode(first.train[0]), first.encoder.decode(first.validation[0])])
    assert both.sum().item() == pytest.approx(whole.encoder.decode(whole.train[0]).sum().item(), rel=1e-5)


@pytest.mark.parametrize(("num", "validation", "limit"), [(100, 0.1, None), (100, 0.1, 30), (100, 0, 7), (5, 0.01, 90)])
def test_carve(num: int, validation: float, limit: int | None):
    train, held_out = carve(num, validation=validation, limit=limit)
    drawn = min(num, limit or num)
    assert len(held_out) == (max(1, round(validation * drawn)) if validation else 0)
    assert len(train) + len(held_out) == drawn
    assert len(set(train) | set(held_out)) == drawn
    assert max([*train, *held_out]) < num
    assert list(train) == sorted(train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation": 1.0}, "`validation` must be a number of at least 0 and below 1"),
        ({"validation": -0.1}, "`validation` must be a number of at least 0 and below 1"),
        ({"limit": 0}, "`limit` must be a whole number of at least 1"),
        ({"limit": 1}, "leave nothing to train on"),
        ({"split": 5}, "has 5 split\\(s\\), numbered from 0; got 5"),
        ({"split": -1}, "got -1"),
        ({"gap": True}, "no gap splits"),
        ({"like": data.load("toy/moons")}, "cannot be prepared like 'toy/moons'"),
    ],
)
def test_bad_arguments(arguments: dict, message: str):
    with pytest.raises(InputError, match=message):
        data.load("digits", **arguments)


def test_limits():
    dataset = data.load("digits", limit=100, limit_test=50)
    assert (len(dataset.train[1]), len(dataset.validation[1]), len(dataset.test[1])) == (90, 10, 50)
    assert len(data.load("digits", limit=10**6).train[1]) == 1293
    assert rows_of(data.load("digits", limit=100, validation=0.1)) != rows_of(
        data.load("digits", limit=100, validation=0.1, generator=torch.Generator().manual_seed(3))
    )


def test_standardizer_guards_constants():
    values = torch.full((1000, 1), 0.1, dtype=torch.float64)
    standardizer = data.Standardizer.fit(values)
    assert standardizer.scale.item() == 1
    assert standardizer.encode(values).abs().max() < 1e-12


def test_standardizer_keeps_dtype_and_input():
    values = torch.randn(10, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    kept = values.clone()
    standardizer = data.Standardizer.fit(values)
    assert standardizer.loc.shape == (2, 1, 1)
    encoded = standardizer.encode(values.double())
    assert encoded.dtype == torch.float64
    torch.testing.assert_close(standardizer.decode(encoded), values.double())
    torch.testing.assert_close(encoded.mean((0, 2, 3)), torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(values, kept)


def test_idx_sets(tiny_data: Path):
    mnist = data.load("mnist", validation=0)
    assert mnist.train[0].shape == (40, 1, 28, 28)
    assert mnist.test[1].tolist() == [i % 10 for i in range(20)]
    pixels = mnist.encoder.decode(mnist.train[0])
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    fashion = data.load("fashion-mnist")
    assert fashion.class_names[9] == "ankle boot"
    assert len(fashion.validation[1]) == 4


def test_a_network_may_view_what_its_convolution_makes_of_an_image(tiny_data: Path):
    # images of one channel once came with strides that torch takes for channels-last, and such a network failed
    for name in ("mnist", "digits"):
        inputs = data.load(name, validation=0).train[0]
        assert inputs.stride() == torch.empty(inputs.shape).stride()
        assert torch.nn.Conv2d(1, 3, 3)(inputs).view(len(inputs), -1).shape[1] == 3 * (inputs.shape[-1] - 2) ** 2


def test_sets_with_only_a_test_part_follow_the_set_they_are_compared_with(tiny_data: Path):
    mnist = data.load("mnist")
    for name in ("kmnist", "notmnist"):
        own, like = data.load(name), data.load(name, like=mnist)
        assert own.validation is None
        with pytest.raises(MissingDataError, match=f"'{name}' has only a test part"):
            own.train  # noqa: B018
        assert abs(own.test[0].mean()) < 1e-5
        assert like.encoder is mnist.encoder
        torch.testing.assert_close(mnist.encoder.decode(like.test[0]), own.encoder.decode(own.test[0]))
        assert torch.equal(own.test[1], like.test[1])


def test_cifar_is_standardised_per_channel(tiny_data: Path):
    cifar = data.load("cifar10", validation=0)
    assert cifar.train[0].shape == (40, 3, 32, 32)
    assert cifar.test[0].shape == (20, 3, 32, 32)
    torch.testing.assert_close(cifar.train[0].mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(cifar.train[0].std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("gap", [False, True])
def test_uci_splits_and_statistics(tiny_data: Path, gap: bool):
    with np.load(tiny_data / "uci/yacht/data.npz") as arrays:
        prefix = "gap_" if gap else ""
        train, test = arrays[f"{prefix}train_idx"][2], arrays[f"{prefix}test_idx"][2]
        inputs, targets = arrays["x"], arrays["y"]
    dataset = data.load("uci/yacht", split=2, gap=gap, validation=0)
    scaler = StandardScaler().fit(inputs[train])  # it guards the constant feature in the same way
    np.testing.assert_allclose(dataset.train[0], scaler.transform(inputs[train]), atol=1e-5)
    np.testing.assert_allclose(dataset.test[0], scaler.transform(inputs[test]), atol=1e-5)
    np.testing.assert_allclose(dataset.target_scale.decode(dataset.test[1].double())[:, 0], targets[test], rtol=1e-6)
    assert (dataset.train[0][:, 5] == 0).all()
    if gap:  # every test value of the feature lies between the two training blocks
        low, high = dataset.test[0][:, 2].min(), dataset.test[0][:, 2].max()
        assert not ((dataset.train[0][:, 2] > low) & (dataset.train[0][:, 2] < high)).any()


def test_small_tables(tiny_data: Path):
    assert data.load("mcycle").feature_names == ("times",)
    co2 = data.load("co2", validation=0)
    assert len(co2.train[1]) + len(co2.test[1]) == 20  # one of 21 has no value
    years = torch.cat([co2.encoder.decode(co2.train[0]), co2.encoder.decode(co2.test[0])])[:, 0]
    torch.testing.assert_close(years[:2], torch.tensor([1958.0, 1959.0]), atol=0.01, rtol=0)
    assert co2.train[0].max() < co2.test[0].min()
    pima = data.load("pima", validation=0)
    assert pima.class_names == ("No", "Yes")
    assert pima.test[1].bincount().tolist() == [5, 5]
    assert pima.input_shape == (7,)


def test_check_finds_wrong_counts_and_wrong_checksums(tiny_data: Path):
    result = data.check("mnist")
    assert not result.ok
    assert result.where == str(tiny_data)
    assert result.problems == ("split 0: 60 rows instead of 70000",)
    (tiny_data / "SHA256SUMS").write_text("0" * 64 + "  mnist/train-images-idx3-ubyte.gz\n")
    assert data.check("mnist").problems[0] == "mnist/train-images-idx3-ubyte.gz differs from SHA256SUMS"
    assert data.check("digits").ok
    assert data.check("digits").where == "scikit-learn"
    assert data.check("toy/moons").ok


def test_check_reports_unreadable_files_and_values(tiny_data: Path):
    write_npz(tiny_data / "toy1d/agw_1d.npz", data=np.full((400, 2), np.nan))
    problems = ["split 0: an input is not finite", "split 0: a target is not finite"]
    assert list(data.check("toy/agw").problems[:4]) == problems * 2  # training and test part
    (tiny_data / "toy1d/matern_1d.npz").write_bytes(b"nothing")
    assert "not a complete npz" in data.check("toy/matern").problems[0]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("mnist", lambda r: write_idx(r / "mnist/train-labels-idx1-ubyte.gz", np.full(40, 11)), "outside 0 to 9"),
        ("mnist", lambda r: write_idx(r / "mnist/train-labels-idx1-ubyte.gz", np.zeros(39)), "do not belong together"),
        ("toy/my", lambda r: write_npz(r / "toy1d/my_1d.npz", data=np.zeros((5, 3))), "not \\[N, 4\\]"),
        ("pima", lambda r: (r / "small/pima_test.csv").write_text("npreg,type\n1,Yes\n"), "lacks rows or one of"),
        ("mcycle", lambda r: (r / "small/mcycle.csv").write_text("times,accel\n1,x\n"), "not a number"),
        ("co2", lambda r: (r / "small/mauna_loa_co2_weekly.csv").write_text("date,co2\n1958x,3\n"), "not a number"),
    ],
)
def test_damaged_files_are_one_clear_sentence(tiny_data: Path, name: str, damage, message: str):
    damage(tiny_data)
    with pytest.raises(FileFormatError, match=message):
        data.load(name)


def test_uci_rows_must_be_used_exactly_once(tiny_data: Path):
    path = tiny_data / "uci/yacht/data.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    write_npz(path, **{**arrays, "test_idx": arrays["test_idx"] * 0})
    with pytest.raises(FileFormatError, match="does not use every row exactly once"):
        data.load("uci/yacht")
    write_npz(path, **{**arrays, "y": arrays["y"][:-1]})
    with pytest.raises(FileFormatError, match="holds x \\(30, 6\\), y \\(29,\\)"):
        data.load("uci/yacht")
