"""Compression: sparse networks beside published results and strong baselines, in resumable rows.

    python benchmarks/compression.py lenet300            # sparse variational dropout and gradual magnitude pruning
    python benchmarks/compression.py lenet300 --epochs 200 --name full
    python benchmarks/compression.py lenet300 --data fashion-mnist
    python benchmarks/compression.py lenet5              # 30 epochs
    python benchmarks/compression.py lenet5 --data fashion-mnist --epochs 12
    python benchmarks/compression.py within              # 27 of them, and 3 of fine-tuning
    python benchmarks/compression.py long                # the same posteriors, pruned to 285 x with teachers
    python benchmarks/compression.py structured          # units of LeNet-5, latency on the exported model
    python benchmarks/compression.py bits                # the same with single weights removed and in few bits
    python benchmarks/compression.py random-labels
    python benchmarks/compression.py random-labels --epochs 200 --name long
    python benchmarks/compression.py widths              # a VGG-like network on CIFAR-10 at four widths
    python benchmarks/compression.py cifar-random-labels
    python benchmarks/compression.py oneshot             # Laplace pruning of a trained network against magnitude
    python benchmarks/compression.py after               # uncertainty of the small network
    python benchmarks/compression.py break-even          # sparse rows against dense layers on this machine
    python benchmarks/compression.py strip               # the picture of weights through training
    python benchmarks/compression.py curves              # the picture of the row oneshot
    python benchmarks/compression.py table               # all rows so far, as Markdown

Every row and seed is one JSON file under benchmarks/results/compression; a stopped run continues.
On MNIST thresholds and budgets come from 5,000 validation images; the network is trained on the other 55,000 and the
test images are used once. Networks in the tables were saved to a file and loaded again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import compression_cifar
import compression_pictures
import compression_units
import torch
from compression_cells import (
    RESULTS,
    accuracy,
    cell,
    error,
    fitted,
    images,
    network,
    shifted,
    sparse_network,
    train_sparse,
)
from dubito.compression import GradualMagnitude, compress
from torch import nn

import dubito
from dubito import MAP, Laplace, Training, Variational, priors, rules
from dubito.beliefs.prediction import ClassPrediction
from dubito.fitting.posterior import Posterior
from dubito.uses.compression.csr import break_even
from dubito.uses.transfer.distillation_losses import SoftLabels

# Posteriors that are also cut at a target (how many times fewer weights), and epochs for the weights that are left.
TARGETS = {
    "lenet5-mnist-quick": ((150, 0), (150, 3), (285, 10)),
    "lenet300-mnist-full": ((61, 0), (68, 0)),
}


def numbers(made: dubito.compression.Compression, data: dubito.data.DataSet) -> dict[str, Any]:
    """What the tables say of a compression, measured on the test images after reloading."""
    report = made.report(data.test, seconds=0.3)
    held_out = made.report(data.validation, seconds=0.001).scores["after"]["accuracy"]
    return {
        "error": 100 * (1 - report.scores["after"]["accuracy"]),
        "error_dense": 100 * (1 - report.scores["before"]["accuracy"]),
        "error_coded": 100 * (1 - report.scores["coded"]["accuracy"]),
        "error_validation": 100 * (1 - held_out),
        "ratio_weights": report.weight_ratio,
        "ratio": report.ratio,
        "ratio_file": report.num_bytes["before"] / report.num_bytes["coded"],
        "report": report.to_json(),
    }


def run_lenet(kind: str, args: argparse.Namespace) -> None:
    """Sparse variational dropout, then gradual magnitude pruning to the same sparsity with the same epochs."""
    data = images(args.data)
    name = f"{kind}-{args.data}-{args.name}"
    for seed in range(args.seeds):
        cell(name, seed, partial(_pruned, kind, data, name, seed, args.epochs))
        gone = 1 - 1 / json.loads((RESULTS / f"{name}-{seed}.json").read_text())["ratio_weights"]
        cell(f"{name}-gradual", seed, partial(_gradual, kind, data, seed, gone, args.epochs))
        for ratio, more in TARGETS.get(name, ()):
            work = partial(_pruned, kind, data, name, seed, args.epochs, ratio, more)
            cell(f"{name}-at-{ratio}-{more}-more", seed, work)


def run_within(args: argparse.Namespace) -> None:
    """LeNet-5 at 150 x within 30 epochs, the last three for fine-tuning; magnitude pruning beside it."""
    data = images(args.data)
    name = f"lenet5-{args.data}-within"
    for seed in range(args.seeds):
        cell(name, seed, partial(_pruned, "lenet5", data, name, seed, args.epochs - 3, 150, 3))
    for seed in range(args.seeds):
        cell(f"{name}-gradual", seed, partial(_gradual, "lenet5", data, seed, 1 - 1 / 150, args.epochs))


def run_long(args: argparse.Namespace) -> None:
    """Prune the posteriors of the row lenet5 from 132 x to 285 x, with three teachers trained on shifted images.

    Beside it magnitude pruning alone, with the same teachers for all of the epochs.
    """
    data = images(args.data)
    name = f"lenet5-{args.data}"
    networks = [partial(_teacher, data, seed) for seed in range(3)]
    trained = [fitted(f"{name}-teacher", i, network("lenet5", 100 + i), work) for i, work in enumerate(networks)]
    answers = [teacher.predict(data.train[0]).log_probs for teacher in trained]
    lesson = SoftLabels(temperature=2.0)
    taught = lesson.answers(ClassPrediction.from_logits(torch.stack(answers).logsumexp(0)))
    for seed in range(args.seeds):
        cell(f"{name}-long", seed, partial(_long, data, name, seed, args.epochs, lesson, taught))
    for seed in range(args.seeds):
        work = partial(_gradual, "lenet5", data, seed, 1 - 1 / 285, 30 + args.epochs, lesson, taught)
        cell(f"{name}-long-gradual", seed, work)


def _teacher(data: Any, seed: int, model: nn.Module, checkpoint: str) -> Posterior:
    training = Training(epochs=8, lr=2e-3, batch_size=200, schedule="linear", checkpoint=checkpoint)
    how: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "progress": False}
    return MAP().fit(model, shifted(data.train, 200), training=training, **how)


def _long(data: Any, name: str, seed: int, epochs: int, lesson: Any, taught: torch.Tensor) -> dict[str, Any]:
    """Remove weights by the posterior, then units without connections, then more weights during training."""
    sparse = compress(sparse_network("lenet5", data, f"{name}-quick", seed, 30), rules.LogAlpha(target=1 - 1 / 132))
    point = MAP(train=False).fit(sparse.model, data.validation, progress=False)
    small = compress(point, rules.Magnitude(threshold=1e-12, reduce="max"), structure="units", data=data.validation)
    weights, rest = (sum(p.numel() for p in m.parameters() if p.ndim > 1) for m in (point.model, small.model))
    gone = {ratio: 1 - weights / ratio / rest for ratio in (132, 285)}
    recipe = GradualMagnitude(gone[285], initial=gone[132], begin=0.0, end=0.6)
    training = Training(epochs=epochs, lr=2e-3, batch_size=200, schedule="hold")
    how: dict[str, Any] = {"likelihood": lesson, "generator": torch.Generator().manual_seed(seed), "progress": False}
    model = recipe.fit(small.model, (data.train[0], taught), training=training, **how).model
    learned = MAP(train=False).fit(model, data.validation, progress=False)
    made = compress(learned, rules.Magnitude(gone[285]), data=data.validation)
    found, dense = numbers(made, data), compress(point, rules.Magnitude(0.0))
    with tempfile.TemporaryDirectory() as folder:
        whole = dense.save(Path(folder) / "dense", format="dense")
    left = sum(int((p != 0).sum()) for p in made.model.parameters() if p.ndim > 1)
    coded = found["report"]["num_bytes"]["coded"]
    return {**found, "ratio_weights": weights / left, "ratio_file": whole / coded}


def _pruned(
    kind: str, data: Any, name: str, seed: int, epochs: int, ratio: float | None = None, more: int = 0
) -> dict[str, Any]:
    """Prune by sparse variational dropout at its own threshold or a target, then fine-tune for a few epochs."""
    posterior = sparse_network(kind, data, name, seed, epochs)
    training = Training(epochs=more, lr=1e-3, batch_size=200, schedule="linear")
    how: dict[str, Any] = {"finetune": data.train, "training": training} if more else {}
    rule = None if ratio is None else rules.LogAlpha(target=1 - 1 / ratio)
    return numbers(compress(posterior, rule, data=data.validation, **how), data)


def _gradual(
    kind: str, data: Any, seed: int, gone: float, epochs: int, lesson: Any = None, taught: torch.Tensor | None = None
) -> dict[str, Any]:
    """Gradual magnitude pruning of a new network, on labels or on the predictions of teachers."""
    training = Training(epochs=epochs, lr=2e-3, batch_size=200, schedule="linear" if lesson is None else "hold")
    how: dict[str, Any] = {"training": training, "generator": torch.Generator().manual_seed(seed), "progress": False}
    if taught is None:
        posterior = GradualMagnitude(gone).fit(network(kind, seed), data.train, **how)
    else:
        labels = (data.train[0], taught)
        fit = GradualMagnitude(gone, end=0.6).fit(network(kind, seed), labels, likelihood=lesson, **how)
        posterior = MAP(train=False).fit(fit.model, data.validation, progress=False)
    return numbers(compress(posterior, rules.Magnitude(gone), data=data.validation), data)


def run_random_labels(args: argparse.Namespace) -> None:
    """Random labels: does a method memorize them?"""
    data = dubito.data.load(args.data, validation=0.0, limit=3_000)
    x, first = data.train[0], (args.data, args.name) == ("mnist", "quick")
    row = "random-labels" if first else f"random-labels-{args.data}-{args.name}"
    for seed in range(args.seeds):
        y = torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(seed))
        recipe = Variational(prior=priors.LogUniform(), initial_scale=0.0067, kl_warmup=0.1)
        dropout = nn.Sequential(*[part for layer in network("lenet300", seed) for part in _with_dropout(layer)])
        methods = {"sparse": (recipe, network("lenet300", seed)), "none": (MAP(), network("lenet300", seed)),
                   "dropout": (MAP(), dropout)}  # fmt: skip
        for method, (how, model) in methods.items():

            def memorize(how: Any = how, model: nn.Module = model, y: torch.Tensor = y) -> dict[str, Any]:
                training = Training(epochs=args.epochs, lr=2e-3, batch_size=100, schedule="linear")
                posterior = how.fit(model, (x, y), training=training, progress=False)
                found = {"train_accuracy": 100 * accuracy(posterior.model, (x, y))}
                if isinstance(how, Variational):
                    found["gone"] = 100 * compress(posterior, rules.LogAlpha(3), allow_empty=True).plan.sparsity
                return found

            cell(f"{row}-{method}", seed, memorize)


def _with_dropout(layer: nn.Module) -> list[nn.Module]:
    return [layer, nn.Dropout(0.1)] if isinstance(layer, nn.ReLU) else [layer]


def run_oneshot(args: argparse.Namespace) -> None:
    """Pruning of a trained LeNet-300-100 without any retraining, by Laplace posteriors and by magnitude."""
    data = images(args.data)
    grid = (0.0, 0.5, 0.8, 0.9, 0.95)
    for seed in range(args.seeds):

        def train(model: nn.Module, checkpoint: str, seed: int = seed) -> Posterior:
            training = Training(epochs=10, batch_size=200, checkpoint=checkpoint)
            how: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "progress": False}
            return MAP(prior_precision=10.0).fit(model, data.train, training=training, **how)

        name = f"oneshot-{args.data}"
        trained = fitted(f"{name}-map", seed, network("lenet300", seed), train)

        def curves(trained: Posterior = trained) -> dict[str, Any]:
            few = (data.train[0][:20_000], data.train[1][:20_000])
            found: dict[str, Any] = {"grid": grid}
            for structure in ("diag", "kron"):
                posterior = Laplace(structure=structure, prior_precision=10.0).fit(trained.model, few, progress=False)
                for kind in ("opd", "obs"):
                    rule = rules.PosteriorDamage(0.5, kind=kind)
                    found[f"{structure} {kind}"] = _curve(posterior, rule, data, grid)
                found[f"{structure} signal to noise"] = _curve(posterior, rules.SignalToNoise(target=0.5), data, grid)
                if structure == "kron":
                    rule = rules.PosteriorDamage(0.5, kind="obs", update=True)
                    found["kron obs, updated"] = _curve(posterior, rule, data, grid)
                made = compress(posterior, data=data.validation)
                found[f"{structure} model reduction"] = [made.plan.sparsity, error(made.model, data)]
            found["magnitude"] = _curve(trained, rules.Magnitude(0.5), data, grid)
            found["magnitude by layer"] = _curve(trained, rules.Magnitude(0.5, scope="layer"), data, grid)
            found["random"] = _curve(trained, rules.Random(0.5), data, grid)
            return found

        cell(name, seed, curves)


def _curve(posterior: Posterior, rule: rules.Rule, data: Any, grid: tuple[float, ...]) -> list[float]:
    swept = compress(posterior, rule, data=data.validation).sweep(data.test, targets=grid)
    return [round(100 * (1 - score), 3) for score in swept.score]


def run_after(args: argparse.Namespace) -> None:
    """Calibration and out-of-distribution detection of the small network with a posterior over its weights."""
    data = images(args.data)
    far = {name: dubito.data.load(name, like=data).test for name in ("kmnist", "notmnist")}
    for seed in range(args.seeds):
        name = f"lenet300-{args.data}-quick"

        def measure(seed: int = seed, name: str = name) -> dict[str, Any]:
            sparse = sparse_network("lenet300", data, name, seed, 12)
            made = compress(sparse, data=data.validation)
            dense = fitted(f"oneshot-{args.data}-map", seed, network("lenet300", seed), _refuse)
            few = (data.train[0][:20_000], data.train[1][:20_000])
            left = Laplace(structure="diag")
            methods = {
                "dense MAP": MAP(train=False).fit(dense.model, few, progress=False),
                "sparse, a point": MAP(train=False).fit(made.model, few, progress=False),
                "sparse, Laplace on what is left": made.posterior(left, few, validation=data.validation),
                "sparse, the variational posterior": sparse,
            }  # fmt: skip
            found: dict[str, Any] = {}
            for method, posterior in methods.items():
                scores = dubito.evaluate(posterior, data.test, ood=far)
                found[method] = {k: scores.scores[k] for k in ("accuracy", "nll", "ece")}
                found[method] |= {f"auroc {k}": v["entropy"]["auroc"] for k, v in scores.ood.items()}
            return found

        cell(f"after-{args.data}", seed, measure)


def _refuse(model: nn.Module, checkpoint: str) -> Posterior:
    raise SystemExit("run the row `oneshot` first: it trains the dense network")


def run_break_even(args: argparse.Namespace) -> None:
    """The time of sparse rows over that of a dense layer."""
    cell("break-even", 0, lambda: {
        f"{i}x{o}, {b} at a time": {str(k): round(v, 2) for k, v in break_even(i, o, b).items()}
        for i, o in ((784, 300), (800, 500)) for b in (1, 128)
    })  # fmt: skip
    print((RESULTS / "break-even-0.json").read_text())


def run_strip(args: argparse.Namespace) -> None:
    """Inputs of three units and a 100 x 100 patch of the second matrix of LeNet-300-100 through training."""
    data = images("mnist")
    shots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint")
        model, watch = network("lenet300", 0), lambda epoch, module: shots.update({epoch: _shot(module)})
        train_sparse(model, data.train, 0, args.epochs, path, watch=watch)
    compression_pictures.draw_strip([(epoch, shots[epoch]) for epoch in (1, 2, 4, 6, 9, 12)])


def _shot(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that carry signal (log α below 3): of three units over the image, and of a patch."""
    weights, means = {}, dict(module.network.named_parameters())
    for name, part in module.parts():
        mean = means[name].detach()
        weights[name] = mean * ((2 * part.log_scale.detach() - mean.square().log()) < 3)
    first, second = weights.values() if len(weights) == 2 else list(weights.values())[:2]
    return first[:3].reshape(3 * 28, 28), second[:, :100]


def run_curves(args: argparse.Namespace) -> None:
    """The picture of the row `oneshot`, of every data set for which it has run."""
    cells = {name: sorted(RESULTS.glob(f"oneshot-{name}-[0-9].json")) for name in ("mnist", "fashion-mnist")}
    found = {name: [json.loads(path.read_text()) for path in paths] for name, paths in cells.items() if paths}
    if not found:
        raise SystemExit("run the row `oneshot` first")
    compression_pictures.draw_curves(found)


def table(args: argparse.Namespace) -> None:
    """Print every row so far: mean and standard deviation over seeds."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        name = path.stem.rpartition("-")[0]
        rows.setdefault(name, []).append(json.loads(path.read_text()))
    for name, cells in rows.items():
        keys = [key for key, value in cells[0].items() if isinstance(value, int | float)]
        shown = "; ".join(f"{key} {_spread([one[key] for one in cells])}" for key in keys)
        print(f"| {name} | {len(cells)} | {shown} |")
        for key, value in cells[0].items():
            if isinstance(value, list | dict) and key != "report":
                print(f"|   {key} | | {json.dumps(value if len(cells) == 1 else [one[key] for one in cells])} |")


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values):.2g}"


ROWS: dict[str, tuple[Callable[[argparse.Namespace], None], int]] = {
    "lenet300": (lambda args: run_lenet("lenet300", args), 12),
    "lenet5": (lambda args: run_lenet("lenet5", args), 30),
    "within": (run_within, 30),
    "long": (run_long, 30),
    "structured": (compression_units.run_structured, 3),
    "bits": (compression_units.run_bits, 4),
    "random-labels": (run_random_labels, 80),
    "widths": (compression_cifar.run_widths, 15),
    "cifar-random-labels": (compression_cifar.run_random_labels, 40),
    "oneshot": (run_oneshot, 10),
    "after": (run_after, 12),
    "break-even": (run_break_even, 0),
    "strip": (run_strip, 12),
    "curves": (run_curves, 0),
    "table": (table, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="passes over the data; each row has its own default")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--name", default="quick", help="the name under which results are kept")
    args = parser.parse_args()
    run, epochs = ROWS[args.row]
    args.epochs = epochs if args.epochs is None else args.epochs
    torch.set_num_threads(1)
    run(args)


if __name__ == "__main__":
    main()
