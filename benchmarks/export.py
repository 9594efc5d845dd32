"""Latency, size and error of exported files, in units of the plain network in the same runtime.

    DUBITO_DATA=... python benchmarks/export.py [--networks mlp lenet5] [--rounds 200] [--only last-layer rank1]

onnxruntime, one thread, process CPU time. Every round runs the plain network and then each file once; the table has the
median over rounds of the ratio to the plain network of the same round, for batches of 1 and of 128. "K separate" is the
time of as many plain networks as the file has samples or members, each in a session with weights of its own.
The outputs are probs, aleatoric and epistemic. The error is the largest difference from `predict` on 256 test images.
Networks are trained for two epochs: latency does not depend on it, and errors are those of a real posterior.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compression_cifar import vgg_like
from torch import Tensor, nn

import dubito
from dubito import (
    MAP,
    SGMCMC,
    SWAG,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Rank1,
    Training,
    Variational,
    models,
    select,
)
from dubito.uses.export import export_network

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "mlp": (models.lenet_300_100, (784,), "mnist"),
    "lenet5": (models.lenet5, (1, 28, 28), "mnist"),
    "vgg": (lambda: vgg_like(16, 0), (3, 32, 32), "cifar10"),
    "resnet20": (lambda: models.resnet20((1, 28, 28), 10), (1, 28, 28), "mnist"),
}
OUTPUTS = ("probs", "aleatoric", "epistemic")
SHORT = Training(epochs=1, batch_size=100)
# Name: recipe, options of the export, and how many separate networks it is compared with.
FAMILIES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "map": (MAP(train=False), {}, 1),
    "last-layer Laplace, kron": (Laplace(weights=select.last_layer()), {}, 1),
    "last-layer Laplace, kron, probs only": (Laplace(weights=select.last_layer()), {"outputs": ("probs",)}, 1),
    "last-layer Laplace, full": (Laplace(weights=select.last_layer(), structure="full"), {}, 1),
    "last-layer subnetwork Laplace": (
        Laplace(weights=select.last_layer() & select.largest_magnitude(0.002), structure="full"), {}, 1),
    "Laplace, kron": (Laplace(), {}, 32),
    "Laplace, kron, 8 weight samples": (Laplace(), {"method": "weights", "num_samples": 8}, 8),
    "subnetwork Laplace, 500 weights": (Laplace(weights=select.largest_magnitude(500), structure="full"), {}, 32),
    "variational": (Variational(), {}, 32),
    "variational, 8 samples": (Variational(), {"method": "weights", "num_samples": 8}, 8),
    "rank-1, 4 components": (Rank1(components=4, start="model"), {}, 4),
    "BatchEnsemble, 4 members": (BatchEnsemble(members=4, start="model"), {}, 4),
    "ensemble of 4": (Ensemble(members=4), {}, 4),
    "MC dropout, 8 masks": (MCDropout(0.2), {"num_samples": 8}, 8),
    "SWAG, 8 samples": (SWAG(collect_every=2), {"num_samples": 8}, 8),
    "SGMCMC of the last layer, 8 samples": (
        SGMCMC(weights=select.last_layer(), burn_in=20, thinning=1, num_samples=8), {"num_samples": 8}, 8),
    "distilled Dirichlet": (None, {}, 1),
}  # fmt: skip


def session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measure(plain: Any, sessions: dict[str, list[Any]], x: Tensor, rounds: int) -> dict[str, float]:
    """Return the median ratio of each list of sessions, run one after the other, to the plain network."""
    array = x.numpy()

    def seconds(some: list[Any]) -> float:
        start = time.process_time()
        for each in some:
            each.run(None, {"input": array})
        return time.process_time() - start

    found: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, some in sessions.items():
            seconds([plain])  # warms the caches for the plain network as much as for the file
            base = seconds([plain])
            seconds(some)
            found[name].append(seconds(some) / base)
    return {name: statistics.median(values) for name, values in found.items()}


def posterior_of(name: str, recipe: Any, trained: Any, data: Any) -> Any:
    if recipe is None:
        teacher = Laplace(weights=select.last_layer()).fit(trained.model, data, progress=False)
        return dubito.distill(
            teacher, copy.deepcopy(trained.model), data[0], "distribution", training=SHORT, progress=False
        )
    training = None if recipe.needs_trained_model or name == "map" else SHORT
    return recipe.fit(trained.model, data, training=training, progress=False)


def run(network: str, args: argparse.Namespace) -> None:
    make, shape, data = NETWORKS[network]
    torch.manual_seed(0)
    found = dubito.data.load(data, limit=args.limit)
    (x, y), (held_out, _) = found.train, found.test
    x, held_out = (part.reshape(len(part), *shape) for part in (x, held_out))
    trained = MAP().fit(make(), (x, y), training=Training(epochs=2, batch_size=100), progress=False)
    columns = ("form", "batch 1", "batch 128", "K separate, batch 1", "batch 128", "kB", "error")
    print(f"\n| {' | '.join((network, *columns))} |\n{'|---' * (len(columns) + 1)}|")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        export_network(trained.model, place / "plain.onnx", x[:4])
        plain = session(place / "plain.onnx")
        others = [session(place / "plain.onnx") for _ in range(32)]  # each holds weights of its own
        print(f"| plain network | | 1 | 1 | | | {(place / 'plain.onnx').stat().st_size / 1000:.0f} | |", flush=True)
        for name, (recipe, options, count) in FAMILIES.items():
            if args.only and not any(each in name for each in args.only):
                continue
            posterior = posterior_of(name, recipe, trained, (x, y))
            options = {"outputs": OUTPUTS, **options}
            made = posterior.export(place / "file.onnx", example=held_out[:256], **options)
            sessions = {"file": [session(made.path)], "separate": others[:count]}
            one = measure(plain, sessions, held_out[:1], args.rounds)
            many = measure(plain, sessions, held_out[:128], max(5, args.rounds // 10))
            ratios = " | ".join(f"{each[key]:.2f}" for key in ("file", "separate") for each in (one, many))
            print(
                f"| {name} | {made.form} | {ratios} | {made.num_bytes / 1000:.0f} | {made.difference:.1e} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet5"], choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--limit", type=int, default=2000, help="Images to train on.")
    parser.add_argument("--only", nargs="*", help="Families whose name contains one of these.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for network in args.networks:
        run(network, args)


if __name__ == "__main__":
    main()
