"""LeNet-5 (Caffe's version) and residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count
from dubito.core.errors import InputError
from dubito.networks.models.dense import check_num_weights

ImageShape = tuple[Count, Count, Count]  # channels, height, width
Shortcut = Literal["pad", "projection"]


@checked_arguments
def lenet5(input_shape: ImageShape = (1, 28, 28), outputs: Count = 10) -> nn.Sequential:
    """Return the LeNet-5 of Caffe: 20 and 50 filters of 5 x 5, each with ReLU and 2 x 2 pooling, then 500 units.

    It has 431,080 weights for 28 x 28 images of one channel and 10 classes (Caffe itself has no ReLU after the
    convolutions; the networks of the pruning literature have).
    """
    channels, height, width = input_shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    if min(rows, columns) < 1:
        raise InputError(f"lenet5 needs images of at least 16 x 16 pixels, not {height} x {width}; try resnet20.")
    check_num_weights(500 * (channels + 50 * rows * columns + outputs))
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * rows * columns, 500),
        nn.ReLU(),
        nn.Linear(500, outputs),
    )


class PadShortcut(nn.Module):
    """A shortcut without weights: every `stride`-th pixel, and zeros for new channels."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Subsample, then pad the channels at the end."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: ``relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))``."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module
        if stride == 1 and in_channels == out_channels:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PadShortcut(in_channels, out_channels, stride)
        else:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


@checked_arguments
def resnet20(
    input_shape: ImageShape = (3, 32, 32), outputs: Count = 10, width: Count = 16, shortcut: Shortcut = "pad"
) -> nn.Sequential:
    """Return the 20-layer residual network for small images (He et al. 2016, https://arxiv.org/abs/1512.03385).

    Three stages of three blocks with `width`, 2 `width` and 4 `width` channels, each at half the resolution of the one
    before. Shortcuts between stages have no weights (option A of the paper), which gives its 0.27 million weights
    (269,722 for 32 x 32 x 3 images and 10 classes); ``shortcut="projection"`` makes them 1 x 1 convolutions (option B).
    """
    return _resnet(input_shape, outputs, [width, 2 * width, 4 * width], num_blocks=3, shortcut=shortcut)


@checked_arguments
def resnet18(input_shape: ImageShape = (3, 32, 32), outputs: Count = 10, width: Count = 64) -> nn.Sequential:
    """Return the 18-layer residual network for small images: a 3 x 3 stem in place of the 7 x 7 one and its pooling.

    Four stages of two blocks with `width` to 8 `width` channels and projection shortcuts (He et al. 2016, option B):
    11,173,962 weights for 32 x 32 x 3 images and 10 classes.
    """
    return _resnet(input_shape, outputs, [width * 2**i for i in range(4)], num_blocks=2, shortcut="projection")


def _resnet(
    input_shape: ImageShape, outputs: int, widths: Sequence[int], num_blocks: int, shortcut: Shortcut
) -> nn.Sequential:
    check_num_weights(widths[-1] * (18 * num_blocks * widths[-1] + outputs))
    blocks: list[nn.Module] = []
    channels = widths[0]
    for stage, out_channels in enumerate(widths):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(BasicBlock(channels, out_channels, stride, shortcut))
            channels = out_channels
    stem = [nn.Conv2d(input_shape[0], widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))
