"""Compression: sparse networks against their published numbers and against honest baselines, by resumable rows.

    python benchmarks/compression.py lenet300            # sparse variational dropout and gradual magnitude pruning
    python benchmarks/compression.py lenet300 --epochs 200 --name full --seeds 1
    python benchmarks/compression.py lenet300 --data fashion-mnist
    python benchmarks/compression.py lenet5              # 30 epochs
    python benchmarks/compression.py structured          # units of LeNet-5, latency on the exported model
    python benchmarks/compression.py bits                # the same with single weights removed and in few bits
    python benchmarks/compression.py random-labels
    python benchmarks/compression.py oneshot             # Laplace pruning of a trained network against magnitude
    python benchmarks/compression.py after               # uncertainty of the small network
    python benchmarks/compression.py break-even          # sparse rows against dense layers on this machine
    python benchmarks/compression.py strip               # the picture of weights through training
    python benchmarks/compression.py table               # all rows so far, as Markdown

Every row and seed is one JSON file under benchmarks/results/compression; a run that is stopped goes on where it was.
Thresholds and budgets come from 5,000 validation images; the network is trained on the other 55,000 and the test images
are looked at once. Networks in the tables were written to a file and loaded again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dubito
import dubito.io
from dubito import MAP, Laplace, Training, Variational, priors, rules
from dubito.compression import GradualMagnitude, compress
from dubito.compression.csr import break_even, seconds
from dubito.posterior import Posterior
from dubito.variational.posterior import Record, VariationalPosterior

RESULTS = Path(__file__).parent / "results" / "compression"
PICTURE = Path(__file__).parents[1] / "docs" / "img" / "sparse-variational-dropout.png"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet300": dubito.models.lenet_300_100,
    "lenet5": dubito.models.lenet5,
}


def images(name: str) -> dubito.data.DataSet:
    """A data set of images with 5,000 of its training images held out for validation."""
    return dubito.data.load(name, validation=5_000 / 60_000)


def cell(name: str, seed: int, work: Callable[[], dict[str, Any]]) -> None:
    """Do a piece of work and write down its numbers, unless they are there."""
    path = RESULTS / f"{name}-{seed}.json"
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    found = work()
    path.write_text(json.dumps({**found, "cpu_seconds": round(time.process_time() - start, 1)}, indent=1))
    print(f"{name} seed {seed}: {_brief(found)}", flush=True)


def _brief(found: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float | int))


def fitted(name: str, seed: int, model: nn.Module, fit: Callable[[nn.Module, str], Posterior]) -> Posterior:
    """A posterior, from its file where there is one; `fit` gets the network and the path of a checkpoint."""
    path = RESULTS / f"{name}-{seed}.safetensors"
    if path.is_file():
        return dubito.load(path, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = path.with_suffix(".checkpoint")
    posterior = fit(model, str(checkpoint))
    posterior.save(path)
    checkpoint.unlink(missing_ok=True)
    return posterior


def network(kind: str, seed: int) -> nn.Module:
    """A network with newly drawn weights."""
    torch.manual_seed(seed)
    return NETWORKS[kind]()


def sparse_network(kind: str, data: dubito.data.DataSet, name: str, seed: int, epochs: int) -> Posterior:
    """A network trained by sparse variational dropout, as in the published recipe.

    It is a loop of its own around `variational.convert`, because two things of the recipe matter for how sparse the
    network gets and `Training` has neither: scales learn at half the rate of means (the papers step in log σ², we in
    log σ), and the rate is constant for half of the time before it falls to zero.
    """
    return fitted(name, seed, network(kind, seed), lambda model, path: train_sparse(model, data, seed, epochs, path))


def train_sparse(
    model: nn.Module, data: dubito.data.DataSet, seed: int, epochs: int, checkpoint: str, watch: Any = None
) -> Posterior:
    """Train: Adam 2e-3, batches of 200, log σ² from −10, the divergence from epoch 1 on (of a long run: 5)."""
    module = dubito.variational.convert(model, prior=priors.LogUniform(), initial_scale=math.exp(-5))
    rates = {name: 1e-3 if name.endswith("log_scale") else 2e-3 for name, _ in module.named_parameters()}
    groups = [{"params": [p], "lr": rates[name], "peak": rates[name]} for name, p in module.named_parameters()]
    optimizer = torch.optim.Adam(groups, fused=True)
    first = _resume(checkpoint, module, optimizer)
    begin, end = (1, 7) if epochs <= 12 else (1, 5) if epochs < 100 else (5, 20)
    x, y = data.train
    for epoch in range(first, epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        torch.manual_seed(1000 * seed + epoch)
        for step, rows in enumerate(order.split(200)):
            done = epoch + step * 200 / len(x)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, 2 * (1 - done / epochs))
            weight = min(max((done - begin) / (end - begin), 0.0), 1.0)
            loss = nn.functional.cross_entropy(module(x[rows]), y[rows]) + weight * module.kl() / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _keep(checkpoint, module, optimizer, epoch + 1)
        if watch is not None:
            watch(epoch + 1, module)
    return _posterior(module, len(x))


def _posterior(module: Any, num_data: int) -> VariationalPosterior:
    """The posterior of a converted network that was trained in a loop of one's own."""
    means = module.mean_module().eval()
    prior = {name: part.prior for name, part in module.parts()}
    record = Record(num_data, *[math.nan] * 3, None, math.nan, None, None, None)
    recipe = Variational(prior=priors.LogUniform())
    found = (module.selection, module.scales(), prior, record)
    return VariationalPosterior(means, dubito.likelihoods.Categorical(), recipe, num_data, *found)


def _keep(path: str, module: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    moments = {str(i): dict(s) for i, s in optimizer.state_dict()["state"].items()}
    dubito.io.save(path, "loop", {"epoch": epoch, "module": dict(module.state_dict()), "moments": moments})


def _resume(path: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not Path(path).is_file():
        return 0
    tree = dubito.io.load(path, "loop")
    module.load_state_dict(tree["module"])
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {int(i): s for i, s in tree["moments"].items()}})
    return int(tree["epoch"])


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
    for seed in range(args.seeds):
        name = f"{kind}-{args.data}-{args.name}"
        cell(name, seed, lambda name=name, seed=seed: numbers(  # type: ignore[misc]
            compress(sparse_network(kind, data, name, seed, args.epochs), data=data.validation), data))  # fmt: skip
        gone = 1 - 1 / json.loads((RESULTS / f"{name}-{seed}.json").read_text())["ratio_weights"]

        def gradual(seed: int = seed, gone: float = gone) -> dict[str, Any]:
            training = Training(epochs=args.epochs, lr=2e-3, batch_size=200, schedule="linear")
            generator = torch.Generator().manual_seed(seed)
            how: dict[str, Any] = {"training": training, "generator": generator, "progress": False}
            posterior = GradualMagnitude(gone).fit(network(kind, seed), data.train, **how)
            return numbers(compress(posterior, rules.Magnitude(gone), data=data.validation), data)

        cell(f"{name}-gradual", seed, gradual)


def run_random_labels(args: argparse.Namespace) -> None:
    """Labels drawn at random: does a method find out that there is nothing to learn?"""
    data = dubito.data.load("mnist", validation=0.0, limit=3_000)
    x = data.train[0]
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
                found = {"train_accuracy": 100 * _accuracy(posterior.model, (x, y))}
                if isinstance(how, Variational):
                    found["gone"] = 100 * compress(posterior, rules.LogAlpha(3), allow_empty=True).plan.sparsity
                return found

            cell(f"random-labels-{method}", seed, memorize)


def _with_dropout(layer: nn.Module) -> list[nn.Module]:
    return [layer, nn.Dropout(0.1)] if isinstance(layer, nn.ReLU) else [layer]


@torch.no_grad()
def _accuracy(model: nn.Module, data: Any) -> float:
    return float((model.eval()(data[0]).argmax(1) == data[1]).double().mean())


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
                found[f"{structure} model reduction"] = [made.plan.sparsity, _error(made.model, data)]
            found["magnitude"] = _curve(trained, rules.Magnitude(0.5), data, grid)
            found["magnitude by layer"] = _curve(trained, rules.Magnitude(0.5, scope="layer"), data, grid)
            found["random"] = _curve(trained, rules.Random(0.5), data, grid)
            return found

        cell(name, seed, curves)


def _curve(posterior: Posterior, rule: rules.Rule, data: Any, grid: tuple[float, ...]) -> list[float]:
    swept = compress(posterior, rule, data=data.validation).sweep(data.test, targets=grid)
    return [round(100 * (1 - score), 3) for score in swept.score]


def _error(model: nn.Module, data: Any) -> float:
    return 100 * (1 - _accuracy(model, data.test))


def run_after(args: argparse.Namespace) -> None:
    """Calibration and out-of-distribution detection of the small network with a posterior on what is left."""
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


def run_structured(args: argparse.Namespace) -> None:
    """Units of LeNet-5, removed by a posterior's damage in rounds with fine-tuning; latency on the exported model."""
    data = images(args.data)
    for seed in range(args.seeds):

        def train(model: nn.Module, checkpoint: str, seed: int = seed) -> Posterior:
            training = Training(epochs=args.epochs, batch_size=100, checkpoint=checkpoint)
            how: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "progress": False}
            return MAP().fit(model, data.train, training=training, **how)

        def shrink(name: str, rule: type[rules.Rule], seed: int = seed) -> dict[str, Any]:
            trained = fitted(f"structured-{args.data}-map", seed, network("lenet5", seed), train)
            few = (data.train[0][:5_000], data.train[1][:5_000])
            model = trained.model
            for targets in ({"0": 0.6, "3": 0.4, "7": 0.6}, {"0": 0.5, "3": 0.4, "7": 0.5}):
                posterior = Laplace(structure="diag", prior_precision=10.0).fit(model, few, progress=False)
                made = compress(
                    posterior, rule(target=targets), structure="units", data=data.validation, finetune=data.train,
                    training=Training(epochs=3, lr=2e-3, batch_size=100, schedule="linear"),
                )  # fmt: skip
                model = made.model
            made.save(RESULTS / f"{name}-{seed}.dubito", format="dense")
            return structured_numbers(trained.model, model, data)

        methods = {
            f"structured-{args.data}": rules.PosteriorDamage,
            f"structured-{args.data}-magnitude": rules.Magnitude,
        }
        for name, rule in methods.items():
            cell(name, seed, lambda name=name, rule=rule: shrink(name, rule))  # type: ignore[misc]


def run_bits(args: argparse.Namespace) -> None:
    """The structured LeNet-5, with most of its remaining weights removed and the rest in few bits: the real file."""
    data = images(args.data)
    for seed in range(args.seeds):

        def pack(seed: int = seed) -> dict[str, Any]:
            dense = network("lenet5", seed)
            small = dubito.compression.load(RESULTS / f"structured-{args.data}-{seed}.dubito", dense)
            few = (data.train[0][:10_000], data.train[1][:10_000])
            found: dict[str, Any] = {}
            with tempfile.TemporaryDirectory() as folder:
                whole = dubito.compression.storage.save(Path(folder) / "dense", dense, "dense", {})
                for gone in (0.7, 0.85, 0.92):  # of the small network; each round goes on from the one before
                    posterior = Laplace(structure="kron", prior_precision=10.0).fit(small, few, progress=False)
                    made = compress(
                        posterior, rules.PosteriorDamage(gone, kind="obs", update=True), data=data.validation,
                        finetune=data.train, training=Training(epochs=6, lr=2e-3, batch_size=100, schedule="linear"),
                    )  # fmt: skip
                    small = made.model
                    # steps come from the posterior of the network that is stored
                    sharp = made.posterior(Laplace(structure="diag", prior_precision=10.0), few)
                    stored = compress(sharp, rules.Magnitude(0.0), data=data.validation)
                    path = Path(folder) / str(gone)
                    found[f"bytes_{gone}"] = stored.save(path)
                    loaded = dubito.compression.load(path, dense)
                    found[f"ratio_file_{gone}"] = whole / found[f"bytes_{gone}"]
                    found[f"error_coded_{gone}"] = _error(loaded, data)
                    found[f"error_validation_{gone}"] = 100 * (1 - _accuracy(loaded, data.validation))
                    found[f"nonzeros_{gone}"] = sum(int((p != 0).sum()) for p in loaded.parameters())
                    found[f"bits_{gone}"] = stored.bits()
            return found

        cell(f"bits-{args.data}", seed, pack)


def structured_numbers(dense: nn.Module, small: nn.Module, data: Any) -> dict[str, Any]:
    """Size and speed of two exported files, and the error of the small one."""
    example = data.validation[0][:128]
    found: dict[str, Any] = {}
    found["widths"] = [m.weight.shape[0] for m in small.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with tempfile.TemporaryDirectory() as folder:
        timings: dict[str, dict[int, float]] = {}
        for name, model in {"dense": dense, "small": small}.items():
            path = Path(folder) / f"{name}.onnx"
            found[f"onnx_bytes_{name}"] = dubito.compression.export.export(model, path, example).num_bytes
            session = _session(path)
            timings[name] = _onnx_milliseconds(session, example)
            found["error" if name == "small" else "error_dense"] = _onnx_error(session, data.test)
    found["ratio_onnx"] = found["onnx_bytes_dense"] / found["onnx_bytes_small"]
    for size in (1, 128):
        found[f"speedup_onnx_{size}"] = timings["dense"][size] / timings["small"][size]
        slow, fast = (_torch_milliseconds(model, example[:size]) for model in (dense, small))
        found[f"speedup_torch_{size}"] = slow / fast
    found["macs"] = [dubito.compression.report.num_macs(model, example) for model in (dense, small)]
    return found


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _onnx_error(session: Any, data: Any) -> float:
    name = session.get_inputs()[0].name
    outputs = [torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for x in data[0].split(1000)]
    return 100 * (1 - float((torch.cat(outputs).argmax(1) == data[1]).double().mean()))


def _onnx_milliseconds(session: Any, example: torch.Tensor) -> dict[int, float]:
    name = session.get_inputs()[0].name
    inputs = {size: example[:size].numpy() for size in (1, 128)}
    return {size: 1000 * seconds(lambda x=x: session.run(None, {name: x}), 0.5) for size, x in inputs.items()}


@torch.no_grad()
def _torch_milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    return 1000 * seconds(lambda: model(x), 0.5)


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
        train_sparse(network("lenet300", 0), data, 0, args.epochs, path, lambda e, m: shots.update({e: _shot(m)}))
    _draw_strip([(epoch, shots[epoch]) for epoch in (1, 2, 4, 6, 9, 12)])


def _shot(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that carry signal (log α below 3): of three units over the image, and of a patch."""
    weights, means = {}, dict(module.network.named_parameters())
    for name, part in module.parts():
        mean = means[name].detach()
        weights[name] = mean * ((2 * part.log_scale.detach() - mean.square().log()) < 3)
    first, second = weights.values() if len(weights) == 2 else list(weights.values())[:2]
    return first[:3].reshape(3 * 28, 28), second[:, :100]


def _draw_strip(shots: list[tuple[int, tuple[torch.Tensor, torch.Tensor]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.7 * len(shots), 6.2), layout="constrained")
    axes = figure.subplots(2, len(shots), height_ratios=(3, 1))
    for column, (epoch, (filters, patch)) in enumerate(shots):
        axes[0, column].imshow(filters, cmap="RdBu", vmin=-0.15, vmax=0.15)
        axes[1, column].imshow(patch, cmap="RdBu", vmin=-0.15, vmax=0.15)
        axes[0, column].set_title(f"epoch {epoch}", fontsize=9)
        axes[1, column].set_title(f"{100 * float((patch != 0).double().mean()):.0f} % left", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print(f"wrote {PICTURE.name}")


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
    "structured": (run_structured, 3),
    "bits": (run_bits, 4),
    "random-labels": (run_random_labels, 80),
    "oneshot": (run_oneshot, 10),
    "after": (run_after, 12),
    "break-even": (run_break_even, 0),
    "strip": (run_strip, 12),
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
