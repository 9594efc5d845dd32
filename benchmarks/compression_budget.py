"""Accuracy at a share of the multiply-accumulates: units by elimination against other rankings and torch-pruning's.

    python benchmarks/compression_budget.py run --networks lenet5 vgg --seeds 3 [--epochs 0 3]   # resumable
    python benchmarks/compression_budget.py table
    python benchmarks/compression_budget.py speed --networks vgg       # in onnxruntime, from the cells
    python benchmarks/compression_budget.py faster --networks vgg      # Budget(speedup=2)
    python benchmarks/compression_budget.py size                       # removing and rounding share a file size
    python benchmarks/compression_budget.py plot --networks lenet5 vgg # docs/img/budget.png

Every method gets the same trained network, the same 2,000 training images to measure on, and the same share of MACs.
The others get new BatchNorm statistics on these images, which elimination does not need: it fits layers to outputs.
With `--epochs 3` the smaller network is trained for three epochs on all training images, with equal settings for all.
LeNet-5 is trained on 20,000 images of MNIST for 3 epochs, the VGG-like one (`compression_cifar.py`) on 10,000 images
of CIFAR-10 for 8, resnet20 on the same for 6, a transformer of two blocks on movie reviews for 4. torch-pruning
(`dubito[shrink]`) goes in steps of 1 % of the channels, with gradients taken anew before each, until the share is met.
It is told the heads of the transformer, and removes dimensions within them: its pruning of whole heads fails in 1.6 in
steps that remove none. On resnet20 it fails at shortcuts that pad channels, so only channels within blocks are removed,
as by elimination. Every cell also has the bytes of the ONNX file and how many times faster it is than that of the
large network in onnxruntime (one thread, process CPU time, median of 100 rounds of batch 1 and 9 of batch 128).
`table` also keeps the cells in `benchmarks/results/budget.jsonl`, from which a new checkout takes them.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from compression_cells import RESULTS, cell, fitted, taught
from compression_cifar import vgg_like
from dubito.compression import Budget, compress
from dubito.compression import load as load_network
from dubito.compression import save as save_network
from export import session
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import MAP, Laplace, Training, rules
from dubito.core.errors import InputError
from dubito.fitting.posterior import Posterior
from dubito.networks.normalization import recalibrate_on
from dubito.uses.compression.report import num_macs
from dubito.uses.export import export_network

Pair = tuple[Tensor, Tensor]
SHARES = (0.5, 0.25, 0.1)
MEASURED = 2000
KEPT = RESULTS.parent / "budget.jsonl"
RULES: dict[str, rules.Rule | None] = {
    "elimination": None,
    "elimination, multiples of 1": None,
    "elimination, multiples of 4": None,
    "elimination, multiples of 8": None,
    "elimination, multiples of 16": None,
    "posterior damage": rules.PosteriorDamage(),
    "magnitude, global": rules.Magnitude(),
    "magnitude, per layer": rules.Magnitude(scope="layer"),
}
PEERS = ("taylor", "hessian", "group norm")
NETWORKS: dict[str, tuple[str, Callable[[int], nn.Module], int, float, int]] = {
    # data, network, epochs, learning rate, training images
    "lenet5": ("mnist", lambda seed: dubito.models.lenet5(), 3, 1e-3, 20_000),
    "vgg": ("cifar10", lambda seed: vgg_like(16, seed), 8, 2e-3, 10_000),
    "resnet20": ("cifar10", lambda seed: dubito.models.resnet20(), 6, 2e-3, 10_000),
    "transformer": ("mr", lambda seed: reader(), 4, 1e-3, 8_000),
}


def reader() -> nn.Module:
    """A transformer for movie reviews."""
    data = dubito.data.load("mr")
    return dubito.models.transformer(len(data.encoder), 2, length=data.input_shape[0], width=64, depth=2, heads=8)


METHODS = (*RULES, *PEERS)


def load(name: str) -> tuple[Pair, Pair]:
    """Training and test images of a network."""
    data, _, _, _, count = NETWORKS[name]
    found = dubito.data.load(data)
    train: Any = tuple(part[:count] for part in found.train)
    return train, found.test


def trained(name: str, seed: int, train: Pair) -> nn.Module:
    """The trained network of a seed, from its file where there is one."""
    _, build, epochs, rate, _ = NETWORKS[name]
    torch.manual_seed(seed)

    def fit(model: nn.Module, checkpoint: str) -> Posterior:
        how = Training(epochs=epochs, lr=rate, batch_size=100, schedule="linear", checkpoint=checkpoint)
        generator = torch.Generator().manual_seed(seed)
        return MAP().fit(model, train, training=how, generator=generator, progress=False)

    return fitted(f"budget-{name}", seed, build(seed), fit).model


@torch.no_grad()
def accuracy(model: nn.Module, test: Pair) -> float:
    """The share of test images that are classified right."""
    parts = zip(test[0].split(500), test[1].split(500), strict=True)
    return sum(float((model.eval()(x).argmax(1) == y).sum()) for x, y in parts) / len(test[1])


def by_torch_pruning(model: nn.Module, kind: str, share: float, few: Pair) -> nn.Module:
    """A smaller network by an importance of torch-pruning."""
    import torch_pruning as tp

    model = copy.deepcopy(model).eval()
    importance = {
        "taylor": tp.importance.GroupTaylorImportance, "hessian": tp.importance.GroupHessianImportance,
        "group norm": tp.importance.GroupMagnitudeImportance,
    }[kind]()  # fmt: skip
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    ends = [layer for name, layer in model.named_modules() if name.endswith(".conv2")]  # whose sums have fixed widths
    first = [layer for layer in model.modules() if ends and isinstance(layer, nn.Conv2d)][:1]
    attentions = [layer for layer in model.modules() if hasattr(layer, "heads")]
    heads = {part: each.heads for each in attentions for part in (each.query, each.key, each.value)}
    example = few[0][:1]
    pruner = tp.pruner.BasePruner(
        model, example, importance, global_pruning=True, pruning_ratio=0.95, max_pruning_ratio=0.95,
        iterative_steps=95, ignored_layers=[last, *first, *ends], num_heads=heads,
    )  # fmt: skip
    most = share * num_macs(model, example)
    while num_macs(model, example) > most and pruner.current_step < 95:
        gradients(model, importance, kind, few)
        pruner.step()
    return model


def gradients(model: nn.Module, importance: Any, kind: str, few: Pair) -> None:
    """Give an importance its gradients; that of the Hessian keeps only the last example's, so it is given the sums."""
    model.zero_grad()
    if kind == "taylor":
        F.cross_entropy(model(few[0][:500]), few[1][:500]).backward()
    elif kind == "hessian":
        squares: dict[nn.Parameter, Tensor] = {}
        for x, y in zip(few[0][:64], few[1][:64], strict=True):
            model.zero_grad()
            F.cross_entropy(model(x[None]), y[None]).backward()
            for p in model.parameters():
                if p.grad is not None:
                    squares[p] = squares.get(p, torch.zeros_like(p)) + p.grad.square()
        importance._accu_grad, importance._counter = squares, dict.fromkeys(squares, 64)


def eliminated(name: str, seed: int, share: float, epochs: int, multiple: int | None = None) -> nn.Module:
    """The network of `compress` under a budget of MACs, from its file where there is one."""
    train, _ = load(name)
    model, few = trained(name, seed, train), measured(train)
    path = RESULTS / f"budget-{name}-{share}-{epochs}-{multiple or 'usual'}-{seed}.network"
    if not path.is_file():
        if epochs:
            small = retrained(eliminated(name, seed, share, 0, multiple), train, epochs)
        else:
            small = compress(diagonal(model, few), budget=Budget(macs=share, multiple=multiple), data=few).model
        save_network(path, small, "dense")
    return load_network(path, model)


def by_rule(model: nn.Module, rule: rules.Rule | None, share: float, few: Pair) -> nn.Module:
    """The network of `compress` under a budget of MACs by another ranking, of any width."""
    return compress(diagonal(model, few), rule, budget=Budget(macs=share, multiple=1), data=few).model


def measured(train: Pair) -> Pair:
    """The images on which all methods measure."""
    return train[0][:MEASURED], train[1][:MEASURED]


def diagonal(model: nn.Module, few: Pair) -> Posterior:
    """The posterior that ranks units."""
    return Laplace(structure="diag", prior_precision=10.0).fit(model, few, progress=False)


def retrained(small: nn.Module, train: Pair, epochs: int) -> nn.Module:
    """The network after so many epochs on all training images."""
    how = Training(epochs=epochs, lr=1e-3, batch_size=100, schedule="linear")
    return MAP().fit(small, train, training=how, progress=False).model


def run(args: argparse.Namespace) -> None:
    """Every method at every share of every network."""
    for seed, name, epochs in product(range(args.seeds), args.networks, args.epochs):
        train, test = load(name)
        few, model = measured(train), trained(name, seed, train)
        cell(
            f"budget-{name}-dense", seed, partial(lambda model, test: {"accuracy": accuracy(model, test)}, model, test)
        )
        for share, method in product(args.shares, args.methods or METHODS):

            def work(
                method: str = method, share: float = share, epochs: int = epochs, name: str = name, seed: int = seed,
                model: nn.Module = model, few: Pair = few, train: Pair = train, test: Pair = test,
            ) -> dict[str, Any]:  # fmt: skip
                if method.startswith("elimination"):
                    alone = 0 if args.teacher else epochs
                    small = eliminated(name, seed, share, alone, int(method.split()[-1]) if "," in method else None)
                else:
                    small = (
                        by_torch_pruning(model, method, share, few) if method in PEERS
                        else by_rule(model, RULES[method], share, few)
                    )  # fmt: skip
                    recalibrate_on(small, few[0].split(100))
                    small = retrained(small, train, epochs) if epochs and not args.teacher else small
                small = taught(small, model, train, epochs) if args.teacher else small
                share_left = num_macs(small, few[0][:1]) / num_macs(model, few[0][:1])
                return {"accuracy": accuracy(small, test), "macs": share_left, **in_onnxruntime(model, small, few[0])}

            try:
                stem = f"budget-{name}-{method}-{share}-{epochs}{'-taught' if args.teacher else ''}"
                cell(stem.replace(" ", "_"), seed, work)
            except InputError as error:  # a twentieth of the units always stays
                print(f"{name}, {method}, {share:.0%}: {error}", flush=True)


def restore() -> None:
    """Write the cells that were kept and are not there."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for line in KEPT.read_text().splitlines() if KEPT.is_file() else []:
        found = json.loads(line)
        path = RESULTS / f"{found.pop('cell')}.json"
        if not path.is_file():
            path.write_text(json.dumps(found, indent=1))


def collect() -> None:
    """Keep all cells in one file."""
    cells = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("budget-*.json"))}
    KEPT.write_text("".join(json.dumps({"cell": name, **found}) + "\n" for name, found in cells.items()))


def table(args: argparse.Namespace) -> None:
    """Print the mean accuracy over seeds, and its standard deviation."""
    collect()
    for name in args.networks:
        for epochs in args.epochs:
            print(f"\n{name}, {epochs} epochs\n\n| | {' | '.join(f'{s:.0%} of the MACs' for s in SHARES)} |")
            print(f"|---|{'---|' * len(SHARES)}")
            for method in METHODS:
                cells = [_mean(f"budget-{name}-{method}-{share}-{epochs}".replace(" ", "_")) for share in SHARES]
                print(f"| {method} | {' | '.join(cells)} |")
            print(f"| dense | {_mean(f'budget-{name}-dense')} |")


def speed(args: argparse.Namespace) -> None:
    """Print the reduction of MACs and of the time in onnxruntime, by elimination: means over seeds."""
    names = ("fewer MACs", "accuracy %", "faster, batch 1", "batch 128", "share of the reduction", "batch 128")
    print(f"| network | multiples of | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for name, share, method in product(args.networks, args.shares, list(RULES)[:5]):
        cells = _cells(f"budget-{name}-{method}-{share}-0".replace(" ", "_"))
        rows = [
            (
                1 / c["macs"],
                100 * c["accuracy"],
                c["faster 1"],
                c["faster 128"],
                *(c["macs"] * c[f"faster {b}"] for b in (1, 128)),
            )
            for c in cells
        ]
        if rows:
            shown = " | ".join(f"{statistics.fmean(column):.2f}" for column in zip(*rows, strict=True))
            print(f"| {name} ({len(rows)}) | {method.split()[-1] if ',' in method else 'usual'} | {shown} |")


def in_onnxruntime(model: nn.Module, small: nn.Module, x: Tensor) -> dict[str, float]:
    """The bytes of a smaller network's file, and how many times faster it is: process CPU time, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        made = [export_network(each, Path(folder) / f"{n}.onnx", x[:4]) for n, each in enumerate((model, small))]
        found: dict[str, float] = {"bytes": made[1].num_bytes, "dense bytes": made[0].num_bytes}
        sessions = [session(each.path) for each in made]

    def seconds(place: int, array: Any) -> float:
        start = time.process_time()
        sessions[place].run(None, {made[place].inputs[0]: array})
        return time.process_time() - start

    for count, rounds in ((1, 100), (128, 9)):
        array = x[:count].numpy()
        ratios = [seconds(0, array) / seconds(1, array) for _ in range(rounds + 1)]
        found[f"faster {count}"] = statistics.median(ratios[1:])
    return found


def faster(args: argparse.Namespace) -> None:
    """Print networks of `Budget(speedup=2)`, seed 0: their speed-up is measured once more after the search."""
    for name in args.networks:
        train, test = load(name)
        few, model = measured(train), trained(name, 0, train)
        limit = Budget(speedup=2, runtime="onnxruntime")
        small = compress(diagonal(model, few), budget=limit, data=few).model
        fewer = num_macs(model, few[0][:1]) / num_macs(small, few[0][:1])
        times = [in_onnxruntime(model, small, few[0])[f"faster {count}"] for count in (1, 128)]
        widths = [len(value) for value in small.parameters() if value.ndim > 1]
        shown = " | ".join(f"{value:.2f}" for value in (fewer, 100 * accuracy(small, test), *times))
        print(f"| {name} | {shown} | {', '.join(f'{each / fewer:.2f}' for each in times)} | {widths} |", flush=True)


def size(args: argparse.Namespace) -> None:
    """Print the growth of the error on validation images for every rounding of a file size, and the test accuracy."""
    data = dubito.data.load("mnist", limit=5000, limit_test=2000, validation=0.2)
    torch.manual_seed(0)
    how = Training(epochs=8, batch_size=100)
    model = MAP().fit(dubito.models.lenet_300_100(), data.train, training=how, progress=False).model
    posterior = Laplace(structure="diag", prior_precision=10.0).fit(model, data.train, progress=False)
    print(f"dense: {accuracy(model, data.test):.4f}")
    for limit in ("40 kB", "20 kB", "10 kB"):
        for structure in ("weights", "units"):
            made = compress(posterior, budget=Budget(size=limit), structure=structure, data=data.validation)
            least: dict[float, Any] = {}
            for each in sorted(made.candidates, key=lambda one: -one.target):
                if each.error is not None:
                    least[each.rounding] = (round(each.target, 3), round(each.error, 4))
            with tempfile.TemporaryDirectory() as folder:
                num_bytes = made.save(Path(folder) / "small")
                found = accuracy(load_network(Path(folder) / "small", model), data.test)
            print(
                f"{limit}, {structure}: {num_bytes} bytes, rounding {made.rounding}, test {found:.4f}; {least}",
                flush=True,
            )


# What a smaller network costs, in per cent of the large one.
COSTS: dict[str, Callable[[dict[str, float]], float]] = {
    "operations": lambda found: 100 * found["macs"],
    "time for 128 inputs": lambda found: 100 / found["faster 128"],
    "bytes of the ONNX file": lambda found: 100 * found["bytes"] / found["dense bytes"],
}


def plot(args: argparse.Namespace) -> None:
    """Draw accuracy against what is left, means over seeds: a row for each cost, a column for each network.

    Full lines are without retraining, dashed ones after three epochs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(args.networks), 8.2), layout="constrained")
    places = figure.subplots(len(COSTS), len(args.networks), squeeze=False).flat
    for axes, (cost, name) in zip(places, product(COSTS, args.networks), strict=True):
        dense = statistics.fmean(_values(f"budget-{name}-dense"))
        for (place, method), epochs in product(enumerate(METHODS), (0, 3)):
            stems = [f"budget-{name}-{method}-{share}-{epochs}".replace(" ", "_") for share in SHARES]
            found = [cells for cells in map(_cells, stems) if cells]
            costs = [statistics.fmean(map(COSTS[cost], cells)) for cells in found]
            known = list(
                zip(costs, [100 * statistics.fmean(c["accuracy"] for c in cells) for cells in found], strict=True)
            )
            start = [(100.0, 100 * dense)] if known and epochs == 0 else []
            label = method if epochs == 0 and known else None
            style: dict[str, Any] = {"color": f"C{place}", "linestyle": "-" if epochs == 0 else "--", "markersize": 3}
            if known:
                axes.plot(*zip(*start, *known, strict=True), marker="o", label=label, **style)
        axes.axhline(100 * dense, color="gray", linewidth=0.6)
        axes.set(title=name, xlabel=f"{cost} left (%)", ylabel="accuracy (%)", xscale="log")
        axes.set_xticks([10, 25, 50, 100], ["10", "25", "50", "100"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    labels = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(Path(__file__).parents[1] / "docs" / "img" / "budget.png", dpi=90)


def _cells(stem: str) -> list[dict[str, float]]:
    return [json.loads(Path(p).read_text()) for p in sorted(RESULTS.glob(f"{stem}-[0-9].json"))]


def _values(stem: str) -> list[float]:
    return [each["accuracy"] for each in _cells(stem)]


def _mean(stem: str) -> str:
    found = _values(stem)
    if not found:
        return ""
    values = torch.tensor(found)
    return (
        f"{100 * values.mean():.1f}" + (f" ± {100 * values.std():.1f}" if len(found) > 1 else "") + f" ({len(found)})"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "speed", "faster", "size", "plot"])
    parser.add_argument("--networks", nargs="*", default=["lenet5"], choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", nargs="*", type=int, default=[0])
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--methods", nargs="*", help="Only these; all by default.")
    parser.add_argument("--teacher", action="store_true", help="The large network teaches in retraining.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    restore()
    {"run": run, "table": table, "speed": speed, "faster": faster, "size": size, "plot": plot}[args.what](args)


if __name__ == "__main__":
    main()
