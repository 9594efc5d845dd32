"""The structures of `Laplace` beside the full covariance: predictive variance, memory and time.

    python benchmarks/structures.py [--seeds 3] [--images 2000] [--parts mlp cnn ekfac resnet20] [--networks LeNet-5]

Two networks that are small enough for ``structure="full"``, on MNIST images of 7 × 7 pixels. All structures have the
same prior precision; on 500 test images their variances of the outputs are compared with those of ``"full"``. `share`
is the ratio of the summed variances, `error` the mean of |log ratio| over outputs. Neither share nor error is
guaranteed to be better for a finer structure. Times are in training epochs of the same data (one thread, CPU time),
`numbers` are those that the posterior keeps, relative to the number of weights.

``ekfac`` measures the time of an EKFAC fit over that of a Kronecker fit right before it, seven times for each of three
networks. ``resnet20`` measures samples of ``"sampled"`` on CIFAR-10 images: training epochs, solver error and peak
memory.
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
from typing import Any

import torch
from common import cpu_seconds, ratios, summary, train_epoch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import MAP, Laplace, Training, models, select
from dubito.core import io

PRIOR = 10.0


def recipes(size: int) -> dict[str, Laplace]:
    """Return what is compared, for a network of `size` weights."""
    given: dict[str, Any] = {"prior_precision": PRIOR}
    return {
        "diag": Laplace(structure="diag", **given),
        "kron": Laplace(structure="kron", **given),
        "ekfac": Laplace(structure="ekfac", **given),
        "low-rank 50": Laplace(structure="low-rank", rank=50, **given),
        "last layer, full": Laplace(structure="full", weights=select.last_layer(), **given),
        "subnetwork 10 %, full": Laplace(structure="full", weights=select.subnetwork(size // 10), **given),
        "subnetwork 50 %, full": Laplace(structure="full", weights=select.subnetwork(size // 2), **given),
        "sampled, 16 draws": Laplace(structure="sampled", draws=16, **given),
        "sampled, 64 draws": Laplace(structure="sampled", draws=64, **given),
        "full": Laplace(structure="full", **given),
    }


def network(part: str) -> nn.Module:
    """Return an untrained network of 1,210 or 1,394 weights."""
    if part == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(49, 20), nn.ReLU(), nn.Linear(20, 10))
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10)]
    return nn.Sequential(*layers)


def variances(posterior: Any, inputs: Tensor) -> Tensor:
    """Return the variances of the outputs."""
    return posterior.functional(inputs)[1].diagonal(dim1=1, dim2=2)


def compare(part: str, seed: int, images: int) -> dict[str, list[float]]:
    """Return share, error, numbers and time of every structure on one trained network."""
    data = dubito.data.load("mnist", validation=0.0)
    first = images * seed
    x, y = (values[first : first + images] for values in data.train)
    x, test = F.avg_pool2d(x, 4), F.avg_pool2d(data.test[0][:500], 4)
    torch.manual_seed(seed)
    model = MAP().fit(network(part), (x, y), training=Training(epochs=15, batch_size=128), progress=False).model
    epoch = min(cpu_seconds(lambda: train_epoch(copy.deepcopy(model), x, y)) for _ in range(3))
    size = sum(value.numel() for value in model.parameters())
    found, exact = {}, None
    for name, recipe in reversed(recipes(size).items()):  # the full covariance first
        kept: list[Any] = []

        def fit(recipe: Laplace = recipe, kept: list[Any] = kept) -> None:
            kept.append(recipe.fit(model, (x, y), progress=False))
            kept[-1].covariance  # noqa: B018 - computed on first use

        seconds = statistics.median(cpu_seconds(fit) for _ in range(3))
        spread = variances(kept[-1], test)
        exact = spread if exact is None else exact
        error = float((spread / exact).clamp_min(1e-12).log().abs().mean())
        numbers = sum(tensor.numel() for tensor in io.tensors(kept[-1].sums)) / size
        found[name] = [float(spread.sum() / exact.sum()), error, numbers, seconds / epoch]
    return found


def show(part: str, seeds: int, images: int) -> None:
    """Print the table of one network, means over seeds."""
    runs = [compare(part, seed, images) for seed in range(seeds)]
    print(f"\n{part}, {images} images, prior precision {PRIOR:g}, {seeds} seeds")
    print(
        "| structure | share of the variance | mean abs log ratio | numbers per weight | fit, epochs |\n"
        "|---|---|---|---|---|"
    )
    for name in reversed(runs[0]):
        share, error, numbers, time = ([run[name][column] for run in runs] for column in range(4))
        spread = statistics.stdev(share) if len(share) > 1 else 0.0
        print(
            f"| {name} | {statistics.mean(share):.3f} ± {spread:.3f} | {statistics.mean(error):.3f} | "
            f"{statistics.mean(numbers):.1f} | {statistics.mean(time):.1f} |",
            flush=True,
        )


def ekfac(images: int, names: list[str] | None) -> None:
    """Print the time of EKFAC over that of K-FAC, on some networks."""
    x, y = (values[:images] for values in dubito.data.load("mnist", validation=0.0).train)
    deep: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for width, stride in ((16, 2), (32, 1), (32, 2), (64, 1)):
        before = deep[-2].out_channels
        deep += [nn.Conv2d(before, width, 3, stride, 1), nn.ReLU()]  # type: ignore[arg-type]
    deep += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    networks = {
        "MLP 784-300-100-10": models.mlp(784, 10, hidden=(300, 100)), "LeNet-5": models.lenet5(),
        "five convolutions": nn.Sequential(*deep),
    }  # fmt: skip
    for name, model in networks.items():
        if names is not None and name not in names:
            continue
        train_epoch(model, x, y)
        model.eval()

        def fit(structure: Any, model: nn.Module = model) -> None:
            recipe = Laplace(structure=structure, prior_precision=PRIOR)
            recipe.fit(model, (x, y), progress=False).covariance  # noqa: B018 - computed on first use

        found = ratios(lambda fit=fit: fit("kron"), {"ekfac": lambda fit=fit: fit("ekfac")}, rounds=7)["ekfac"]
        print(f"{name}, {images} images: EKFAC takes {summary(found)} times K-FAC", flush=True)


def resnet20(images: int, steps: int, prior: float, draws: int) -> None:
    """Print what samples of a resnet20 cost."""
    x, y = (values[:images] for values in dubito.data.load("cifar10", validation=0.0).train)
    torch.manual_seed(0)
    model = models.resnet20((3, 32, 32), 10)
    for _ in range(5):
        train_epoch(model, x, y)
    model.eval()

    def epochs() -> list[float]:
        return [cpu_seconds(lambda: train_epoch(copy.deepcopy(model), x, y)) for _ in range(3)]

    before = epochs()
    kept: list[Any] = []
    chosen: Any = prior if prior else Laplace().prior_precision
    recipe = Laplace(structure="sampled", prior_precision=chosen, draws=draws, steps=steps)
    seconds = cpu_seconds(lambda: kept.append(recipe.fit(model, (x, y), progress=False)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    epoch = statistics.median(before + epochs())
    print(
        f"resnet20, {images} images, {draws} samples, prior precision {prior:g}, at most {steps} steps: "
        f"{seconds / epoch:.0f} training epochs, error {kept[0].sums['error']:.3f}, peak memory {peak:.2f} GB"
    )


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", choices=("mlp", "cnn", "ekfac", "resnet20"), default=("mlp", "cnn"))
    parser.add_argument("--networks", nargs="+", help="For ekfac; by default all three.")
    parser.add_argument("--steps", type=int, default=3, help="Of the solver, for resnet20.")
    parser.add_argument("--draws", type=int, default=16, help="For resnet20.")
    parser.add_argument(
        "--prior", type=float, default=100.0, help="The prior precision, for resnet20; 0 lets the fit choose."
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.parts:
        if part == "resnet20":
            resnet20(options.images, options.steps, options.prior, options.draws)
        elif part == "ekfac":
            ekfac(options.images, options.networks)
        else:
            show(part, options.seeds, options.images)


if __name__ == "__main__":
    main()
