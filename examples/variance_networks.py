"""Variance networks: a layer with all information in the variances of its weights, and the effect on pruning rules.

The first layer's weights are independent normals with a fixed mean of zero; only their scales are trained. The
network at the means is at chance, one weight sample is better, and the mean over many samples classifies almost as well
as a usual network (Neklyudov et al. 2019, https://arxiv.org/abs/1803.03764).

A rule that compares a mean with zero removes every such weight, and then the network is at chance. The second moment
μ² + σ², the power of a weight, measures its effect. Run it as

    python examples/variance_networks.py [--picture docs/img/variance.png]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from dubito import data, priors, rules, select
from dubito.methods.variational import convert

EPOCHS = 100
WIDTH = 300
LAYER = "1.weight"


def train(images: Tensor, labels: Tensor) -> nn.Module:
    """Return a network whose first layer has zero means, trained by its scales."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    nn.init.zeros_(model[1].weight)
    module = convert(model, weights=select.layers("1"), initial_scale=0.1, prior=priors.Normal(0, 1))
    dict(module.network.named_parameters())[LAYER].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            functional.cross_entropy(module(images[rows]), labels[rows]).backward()
            optimizer.step()
    return module


@torch.no_grad()
def accuracy(module: nn.Module, images: Tensor, labels: Tensor, draws: int) -> float:
    """Return the accuracy of the mean of the probabilities over several draws of the weights."""
    probs = torch.stack([module(images).softmax(-1) for _ in range(draws)]).mean(0)
    return float((probs.argmax(-1) == labels).double().mean())


def scales(module: nn.Module) -> Tensor:
    return dict(module.parts())[LAYER].log_scale  # type: ignore[operator]


@torch.no_grad()
def without(module: nn.Module, keep: Tensor, images: Tensor, labels: Tensor, draws: int) -> float:
    """Return the accuracy without some weights: a removed weight is exactly zero."""
    log_scale = scales(module)
    before = log_scale.clone()
    log_scale[~keep.flatten() if log_scale.ndim == 1 else ~keep] = -30.0
    found = accuracy(module, images, labels, draws)
    log_scale.copy_(before)
    return found


def draw(curves: dict[str, dict[float, float]], path: str) -> None:
    """Draw the accuracy against the share of the layer's weights that is kept."""
    from dubito.uses.reporting import plots

    figure = plots.shift({name: [curve] for name, curve in curves.items()}, score="Test accuracy", target=0.1)
    figure.axes[0].set_xlabel("Weights kept (%)")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default=None)
    picture = parser.parse_args().picture
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = data.load("digits", validation=0)
    # Pixels from 0 to 1: such a layer sees the squares of its inputs, and below zero they would lose their sign.
    (train_images, train_labels), (test_images, labels) = digits.train, digits.test
    module = train(digits.encoder.decode(train_images), train_labels)  # type: ignore[union-attr]
    images = digits.encoder.decode(test_images)  # type: ignore[union-attr]
    at_means = float((module.mean_module()(images).argmax(-1) == labels).double().mean())  # type: ignore[operator]
    print(f"at the means {at_means:.1%}")
    for draws in (1, 10, 100):
        print(f"mean of {draws:3d} draws {accuracy(module, images, labels, draws):.1%}")
    variance = (2 * scales(module).detach()).exp().reshape(WIDTH, 64)
    mean = torch.zeros_like(variance)
    prior = ({LAYER: mean}, {LAYER: torch.ones_like(mean)})
    statistics = rules.WeightStatistics({LAYER: mean}, {LAYER: variance}, {LAYER: 1 / variance}, prior)
    for rule in (rules.SignalToNoise(1.0), rules.LogAlpha(3.0), rules.ModelReduction()):
        keep = rule.keep(rule.relevance(statistics))[LAYER]
        left = without(module, keep, images, labels, 100)
        print(f"{rule!r} keeps {float(keep.double().mean()):.0%} of the layer: {left:.1%}")
    power = mean.square() + variance
    curves: dict[str, dict[float, float]] = {"highest power": {}, "lowest power": {}}
    for share in (0.5, 0.25, 0.1):
        kept = (power >= power.flatten().quantile(1 - share), power <= power.flatten().quantile(share))
        for (name, curve), keep in zip(curves.items(), kept, strict=True):
            curve[100 * share] = without(module, keep, images, labels, 100)
            print(f"the {share:.0%} of the {name}: {curve[100 * share]:.1%}")
    if picture:
        draw(curves, picture)


if __name__ == "__main__":
    main()
