"""Shifted data: image corruptions in five severities, rotation, and shuffled labels.

All corruptions work on float images `[N, C, H, W]` with pixels in [0, 1] and give such images. Standardised images, as
in a `DataSet`, are corrupted by giving the `standardizer` that made them: they are brought back to pixels first. The
random draws of a corruption do not depend on the severity, so that with equal seeds a higher severity is the same
corruption, made stronger. The kinds follow Hendrycks and Dietterich 2019, "Benchmarking Neural Network Robustness to
Common Corruptions and Perturbations"; lengths scale with the image, so that one severity means the same at 8 and at 32
pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Final

import torch
from torch import Tensor
from torch.nn import functional

from dubito.core.arguments import checked_arguments
from dubito.core.arrays import to_tensor
from dubito.core.constraints import Probability, Range, check
from dubito.core.errors import InputError
from dubito.data.dataset import DataSet, Pair, Standardizer

_CHUNK = 1000
_TOLERANCE = 1e-3  # pixels that went through a standardizer come back with rounding
SEVERITIES: Final = (1, 2, 3, 4, 5)
Severity = Annotated[int, Range(0, max(SEVERITIES))]


@checked_arguments
def rotate(inputs: Tensor, degrees: float | Tensor, *, standardizer: Standardizer | None = None) -> Tensor:
    """Rotate images counterclockwise about their centre, with bilinear interpolation and black (0) outside.

    Args:
        inputs: Images `[N, C, H, W]`.
        degrees: One angle, or one per image `[N]`.
        standardizer: What standardised the images, if they are; it tells what black is.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> rotate(image, 90.0).round(decimals=4).tolist()
        [[[[2.0, 4.0], [1.0, 3.0]]]]
    """
    _check_images(inputs)
    angles = to_tensor(degrees, "degrees").to(inputs)
    if angles.shape not in ((), (1,), (len(inputs),)):
        raise InputError(f"degrees must be one number, or one for each of {len(inputs)} images, not {angles.shape}.")
    angles = angles.expand(len(inputs))
    pixels = inputs if standardizer is None else standardizer.decode(inputs)
    chunks = [_rotate(*pair) for pair in zip(pixels.split(_CHUNK), angles.split(_CHUNK), strict=True)]
    rotated = torch.cat(chunks)
    return rotated if standardizer is None else standardizer.encode(rotated)


def _rotate(pixels: Tensor, degrees: Tensor) -> Tensor:
    # Normalised coordinates run from -1 to 1 along both sides, whatever their lengths: hence the aspect ratio.
    aspect = pixels.shape[-2] / pixels.shape[-1]
    cos, sin = torch.cos(torch.deg2rad(degrees)), torch.sin(torch.deg2rad(degrees))
    zero = torch.zeros_like(cos)
    return _warp(pixels, [[cos, -sin * aspect, zero], [sin / aspect, cos, zero]])


def _warp(pixels: Tensor, rows: list[list[Tensor]]) -> Tensor:
    """Apply one affine map of normalised coordinates to each image; the entries of the maps are `[N]` each."""
    matrices = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    grid = functional.affine_grid(matrices, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _rotation(pixels: Tensor, degrees: float, generator: torch.Generator) -> Tensor:
    return _rotate(pixels, degrees * _signs(pixels, generator))


def _noise(pixels: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(pixels.shape, generator=generator, dtype=pixels.dtype, device=generator.device)
    return pixels + scale * noise.to(pixels.device)


def _blur(pixels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Blur with a Gaussian whose standard deviation is a fraction of the shorter side; edges are replicated."""
    channels, height, width = pixels.shape[1:]
    sigma = fraction * min(height, width)
    radius = math.ceil(3 * sigma)
    offsets = torch.arange(-radius, radius + 1, dtype=pixels.dtype, device=pixels.device)
    kernel = torch.softmax(-(offsets**2) / (2 * sigma**2), dim=0).expand(channels, 1, 1, -1)
    padded = functional.pad(pixels, (radius,) * 4, mode="replicate")
    blurred = functional.conv2d(padded, kernel, groups=channels)
    return functional.conv2d(blurred, kernel.transpose(-1, -2), groups=channels)


def _contrast(pixels: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    mean = pixels.mean(dim=(-2, -1), keepdim=True)
    return mean + factor * (pixels - mean)


def _brightness(pixels: Tensor, offset: float, generator: torch.Generator) -> Tensor:
    return pixels + offset


def _occlusion(pixels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Cover a rectangle with grey; its sides are a fraction of the image's, and it grows with the severity."""
    place = torch.rand(2, len(pixels), 1, generator=generator, device=generator.device).to(pixels.device)
    covered = []
    for start, side in zip(place, pixels.shape[-2:], strict=True):
        length = max(1, round(fraction * side))
        # Uniform over the places; `rand` may round up to 1 in the product.
        first = (start * (side - length + 1)).floor().clamp(max=side - length)
        position = torch.arange(side, device=pixels.device)
        covered.append((position >= first) & (position < first + length))
    rows, columns = covered
    return pixels.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.5)


def _translation(pixels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Shift by a fraction of the sides in a random direction; the uncovered border is black."""
    angle = 2 * math.pi * torch.rand(len(pixels), generator=generator, device=generator.device).to(pixels)
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    return _warp(pixels, [[one, zero, 2 * fraction * angle.cos()], [zero, one, 2 * fraction * angle.sin()]])


def _signs(pixels: Tensor, generator: torch.Generator) -> Tensor:
    return (2 * torch.randint(2, (len(pixels),), generator=generator, device=generator.device) - 1).to(pixels)


# What each kind does at severities 1 to 5, and how strong it is there.
_CORRUPTIONS: Final[dict[str, tuple[Callable[[Tensor, float, torch.Generator], Tensor], tuple[float, ...]]]] = {
    "rotation": (_rotation, (10.0, 20.0, 30.0, 45.0, 60.0)),  # degrees
    "noise": (_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),  # standard deviation
    "blur": (_blur, (0.02, 0.035, 0.05, 0.07, 0.1)),  # deviation of the filter, in sides
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),  # factor
    "brightness": (_brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),  # added to every pixel
    "occlusion": (_occlusion, (0.2, 0.35, 0.5, 0.6, 0.75)),  # in sides
    "translation": (_translation, (0.05, 0.1, 0.15, 0.2, 0.25)),  # in sides
}
KINDS: Final = tuple(_CORRUPTIONS)


@checked_arguments
def corrupt(
    inputs: Tensor,
    kind: str,
    severity: int,
    *,
    standardizer: Standardizer | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Corrupt images `[N, C, H, W]` in one of `KINDS`: severity 1 is slight, 5 is strong, 0 leaves them as they are.

    Args:
        inputs: Images with pixels in [0, 1], or standardised ones together with their `standardizer`.
        kind: One of `KINDS`.
        severity: 0 to 5.
        standardizer: What standardised the images (`dataset.encoder`); the result is standardised alike.
        generator: Where noise, places and directions come from; by default the same ones on every call.
    """
    _check_images(inputs)
    _check_kind(kind, severity)
    if severity == 0:
        return inputs.clone()
    function, strengths = _CORRUPTIONS[kind]
    generator = generator or torch.Generator().manual_seed(0)
    pixels = inputs if standardizer is None else standardizer.decode(inputs)
    if pixels.min() < -_TOLERANCE or pixels.max() > 1 + _TOLERANCE:
        raise InputError("Corruptions need pixels in [0, 1]: give the standardizer that made these inputs.")
    chunks = [function(chunk, strengths[severity - 1], generator).clamp_(0, 1) for chunk in pixels.split(_CHUNK)]
    corrupted = torch.cat(chunks)
    return corrupted if standardizer is None else standardizer.encode(corrupted)


def _check_kind(kind: str, severity: int) -> None:
    if kind not in _CORRUPTIONS:
        raise InputError(f"There is no corruption {kind!r}: choose one of {', '.join(KINDS)}.")
    check("severity", Severity, severity)


def _check_images(inputs: Tensor) -> None:
    if inputs.ndim != 4 or not inputs.is_floating_point() or len(inputs) == 0:
        raise InputError(f"Corruptions need float images [N, C, H, W], got {inputs.dtype} {list(inputs.shape)}.")


@dataclass(frozen=True, eq=False)
class _Severities(Mapping[int, Pair]):
    """A pair under one corruption, by severity; each is computed on access and is always the same."""

    pair: Pair
    kind: str
    severities: tuple[int, ...]
    standardizer: Standardizer
    seed: int

    def __getitem__(self, severity: int) -> Pair:
        if severity not in self.severities:
            raise KeyError(severity)
        inputs, targets = self.pair
        generator = torch.Generator().manual_seed(self.seed)
        return corrupt(inputs, self.kind, severity, standardizer=self.standardizer, generator=generator), targets

    def __iter__(self) -> Iterator[int]:
        return iter(self.severities)

    def __len__(self) -> int:
        return len(self.severities)


@checked_arguments
def shifts(
    dataset: DataSet,
    kinds: Sequence[str] = KINDS,
    severities: Sequence[int] = SEVERITIES,
    *,
    generator: torch.Generator | None = None,
) -> dict[str, Mapping[int, Pair]]:
    """Corrupt the test part of an image data set: `shifts(dataset)["noise"][3]` is a pair for `evaluate`.

    The pairs are made one at a time, when they are asked for, so that the whole grid never lies in memory.
    """
    standardizer = dataset.encoder
    if not isinstance(standardizer, Standardizer) or len(dataset.input_shape) != 3:
        raise InputError(f"Corruptions need a data set of images; {dataset.name!r} has inputs {dataset.input_shape}.")
    for kind, severity in product(kinds, severities):
        _check_kind(kind, severity)
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return {
        kind: _Severities(dataset.test, kind, tuple(severities), standardizer, seed + KINDS.index(kind))
        for kind in kinds
    }


@checked_arguments
def shuffle_labels(targets: Tensor, fraction: Probability = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Permute the targets of a random `fraction` of the rows, so that they no longer depend on the inputs.

    The counts of the classes stay as they are. A network that fits shuffled labels has memorised them (Zhang et al.
    2017, "Understanding Deep Learning Requires Rethinking Generalization").
    """
    if targets.ndim == 0:
        raise InputError("`targets` must have an axis of rows, but it is a single number.")
    generator = generator or torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(targets), generator=generator, device=generator.device)
    chosen = chosen[: round(fraction * len(targets))].to(targets.device)
    # `chosen` is in random order already: putting its rows back in ascending order is the permutation.
    shuffled = targets.clone()
    shuffled[chosen.sort().values] = targets[chosen]
    return shuffled
