from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.ndimage
import torch
from dubito.errors import InputError

from dubito import data
from dubito.data import KINDS, SEVERITIES, corrupt, rotate, shifts, shuffle_labels
from oracles import seeded_generator


def random_images(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(*shape, generator=seeded_generator(), dtype=dtype)


def draws(kind: str) -> bool:
    """Whether this corruption is random: whether it moves the generator."""
    generator = seeded_generator()
    before = generator.get_state()
    corrupt(random_images(2, 1, 6, 6), kind, 3, generator=generator)
    return not torch.equal(generator.get_state(), before)


@pytest.fixture(scope="module")
def digits() -> data.DataSet:
    return data.load("digits")


@pytest.fixture(scope="module")
def pixels(digits: data.DataSet) -> torch.Tensor:
    return digits.encoder.decode(digits.test[0]).clamp(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_distortion_grows_with_severity(kind: str, pixels: torch.Tensor):
    distortion = [
        (corrupt(pixels, kind, s, generator=seeded_generator()) - pixels).square().mean() for s in (0, *SEVERITIES)
    ]
    assert distortion[0] == 0
    assert all(low < high for low, high in pairwise(distortion))
    assert distortion[-1] > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 3, 12, 20)])
def test_every_kind_keeps_shape_dtype_range_and_input(kind: str, shape: tuple[int, ...]):
    images = random_images(*shape)
    kept = images.clone()
    for severity in SEVERITIES:
        corrupted = corrupt(images, kind, severity, generator=seeded_generator())
        assert corrupted.shape == images.shape
        assert corrupted.dtype == torch.float64
        assert corrupted.min() >= 0
        assert corrupted.max() <= 1
    assert torch.equal(images, kept)
    assert torch.equal(corrupt(images, kind, 0), images)
    assert corrupt(images, kind, 0) is not images


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_and_by_default_repeatable(kind: str, pixels: torch.Tensor):
    first, again, other = (corrupt(pixels, kind, 3, generator=seeded_generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(corrupt(pixels, kind, 3), corrupt(pixels, kind, 3))
    assert torch.equal(first, other) != draws(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_standardised_images_are_corrupted_as_pixels(kind: str, digits: data.DataSet, pixels: torch.Tensor):
    standardised = corrupt(digits.test[0], kind, 4, standardizer=digits.encoder, generator=seeded_generator())
    expected = digits.encoder.encode(corrupt(pixels, kind, 4, generator=seeded_generator()))
    torch.testing.assert_close(standardised, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_join_without_a_seam(kind: str):
    """Where the draws do not matter, image n of many is image n alone."""
    images = random_images(1003, 1, 6, 6)
    corrupted = corrupt(images, kind, 2, generator=seeded_generator())
    assert len(corrupted) == 1003
    if not draws(kind):
        torch.testing.assert_close(corrupted[[999, 1000, 1002]], corrupt(images[[999, 1000, 1002]], kind, 2))
    else:
        assert not (corrupted == images).flatten(1).all(1).any()


@pytest.mark.parametrize("degrees", [10.0, 33.0, 90.0, -120.0, 180.0])
@pytest.mark.parametrize("shape", [(2, 1, 9, 9), (2, 3, 8, 8), (1, 2, 7, 12)])
def test_rotation_equals_scipy(degrees: float, shape: tuple[int, ...]):
    images = random_images(*shape)
    expected = scipy.ndimage.rotate(images.numpy(), degrees, axes=(2, 3), reshape=False, order=1, mode="grid-constant")
    torch.testing.assert_close(rotate(images, degrees), torch.from_numpy(expected), atol=1e-10, rtol=0)


def test_rotation_by_right_angles_one_angle_per_image_and_back():
    images = random_images(3, 2, 8, 8)
    angles = torch.tensor([0.0, 90.0, 180.0])
    expected = torch.stack([torch.rot90(image, k, (1, 2)) for k, image in enumerate(images)])
    torch.testing.assert_close(rotate(images, angles), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(rotate(images, 360.0), images, atol=1e-10, rtol=0)


def test_rotated_standardised_images_get_black_corners(digits: data.DataSet):
    turned = rotate(digits.test[0], 45.0, standardizer=digits.encoder)
    black = digits.encoder.encode(torch.zeros(1, 1, 1, 1)).item()
    torch.testing.assert_close(turned[:, :, 0, 0], torch.full((360, 1), black), atol=1e-5, rtol=0)


def test_blur_equals_scipy():
    images = random_images(2, 3, 16, 16)
    sigma = 0.05 * 16  # severity 3
    expected = scipy.ndimage.gaussian_filter(images.numpy(), sigma, axes=(2, 3), mode="nearest", radius=3)
    torch.testing.assert_close(corrupt(images, "blur", 3), torch.from_numpy(expected), atol=1e-12, rtol=0)


def test_noise_contrast_and_brightness_do_what_they_say():
    grey = torch.full((50, 1, 20, 20), 0.5, dtype=torch.float64)
    noise = corrupt(grey, "noise", 1, generator=seeded_generator()) - grey
    assert noise.std().item() == pytest.approx(0.08, rel=4 / np.sqrt(2 * noise.numel()))
    images = 0.25 + 0.5 * random_images(4, 3, 5, 5)
    flat = corrupt(images, "contrast", 5)
    torch.testing.assert_close(flat.mean((-2, -1)), images.mean((-2, -1)))
    torch.testing.assert_close(flat.std((-2, -1)), 0.15 * images.std((-2, -1)))
    torch.testing.assert_close(corrupt(images, "brightness", 2), images + 0.2)


def test_occlusion_covers_a_rectangle_and_a_stronger_one_contains_it():
    black = torch.zeros(2000, 1, 20, 40)
    covered = [corrupt(black, "occlusion", severity, generator=seeded_generator()) == 0.5 for severity in SEVERITIES]
    for height, mask in zip((4, 7, 10, 12, 15), covered, strict=True):
        assert (mask.flatten(1).sum(1) == height * 2 * height).all()
        assert (mask.any(3).sum(2) == height).all()
    assert all((large | ~small).all() for small, large in pairwise(covered))
    assert covered[0].any(0).all()  # every pixel can be hit


def test_translation_moves_the_centre_of_mass_by_the_stated_length():
    images = torch.zeros(100, 1, 32, 32, dtype=torch.float64)
    images[:, :, 14:18, 14:18] = 0.5
    moved = corrupt(images, "translation", 2, generator=seeded_generator())
    position = torch.arange(32, dtype=torch.float64)

    def centre(x: torch.Tensor) -> torch.Tensor:
        mass = x.sum((1, 2, 3))
        return (
            torch.stack([(x.sum((1, 3)) * position).sum(1), (x.sum((1, 2)) * position).sum(1)], dim=1) / mass[:, None]
        )

    lengths = (centre(moved) - centre(images)).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full((100,), 3.2, dtype=torch.float64), atol=1e-5, rtol=0)


def test_shifts_are_lazy_pairs_that_do_not_depend_on_order(digits: data.DataSet):
    grid = shifts(digits)
    assert tuple(grid) == KINDS
    assert all(tuple(column) == SEVERITIES and len(column) == 5 for column in grid.values())
    inputs, targets = grid["noise"][3]
    assert targets is digits.test[1]
    assert torch.equal(inputs, grid["noise"][3][0])
    few = shifts(digits, ["noise"], [0, 3])
    assert torch.equal(few["noise"][3][0], inputs)
    assert torch.equal(few["noise"][0][0], digits.test[0])
    assert not torch.equal(shifts(digits, generator=seeded_generator(7))["noise"][3][0], inputs)
    assert len(list(few["noise"].items())) == 2
    with pytest.raises(KeyError):
        few["noise"][1]


def test_bad_input(digits: data.DataSet, pixels: torch.Tensor):
    for call, message in [
        (lambda: corrupt(pixels, "fog", 1), "no corruption 'fog': choose one of rotation"),
        (lambda: corrupt(pixels, "noise", 6), "from 0 to 5, got 6"),
        (lambda: corrupt(pixels[0], "noise", 1), r"need float images \[N, C, H, W\]"),
        (lambda: corrupt(pixels[:0], "noise", 1), "need float images"),
        (lambda: rotate((pixels * 255).byte(), 10.0), "got torch.uint8"),
        (lambda: corrupt(digits.test[0], "noise", 1), "give the standardizer"),
        (lambda: shifts(digits, ["fog"]), "no corruption 'fog'"),
        (lambda: shifts(digits, severities=[9]), "from 0 to 5"),
        (lambda: shifts(data.load("diabetes")), "'diabetes' has inputs"),
        (lambda: shuffle_labels(torch.arange(3), 1.5), "from 0 to 1"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


def test_labels_are_permuted_among_the_chosen_rows():
    targets = torch.arange(10_000)
    whole = shuffle_labels(targets, generator=seeded_generator())
    assert torch.equal(whole.sort().values, targets)
    assert (whole == targets).sum() < 10  # a random permutation has one fixed point on average
    assert abs(np.corrcoef(whole, targets)[0, 1]) < 4 / np.sqrt(10_000)
    half = shuffle_labels(targets, 0.5, generator=seeded_generator())
    assert torch.equal(half.sort().values, targets)
    assert 5000 <= (half == targets).sum() < 5010
    assert torch.equal(shuffle_labels(targets, 0.0), targets)
    assert torch.equal(shuffle_labels(targets), shuffle_labels(targets))
    assert torch.equal(targets, torch.arange(10_000))
    assert torch.equal(shuffle_labels(torch.eye(4)).sum(0), torch.ones(4))  # rows of many-column targets move whole
