"""The rows of `compression.py` on whole units of LeNet-5: exported files, their speed, and the same in few bits."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from compression_cells import RESULTS, accuracy, cell, error, fitted, images, network
from dubito.compression import compress
from torch import nn

import dubito
from dubito import MAP, Laplace, Training, rules
from dubito.fitting.posterior import Posterior
from dubito.uses.compression.csr import seconds
from dubito.uses.export import export_network


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
                whole = dubito.uses.compression.storage.save(Path(folder) / "dense", dense, "dense", {})
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
                    found[f"error_coded_{gone}"] = error(loaded, data)
                    found[f"error_validation_{gone}"] = 100 * (1 - accuracy(loaded, data.validation))
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
            found[f"onnx_bytes_{name}"] = export_network(model, path, example).num_bytes
            session = _session(path)
            timings[name] = _onnx_milliseconds(session, example)
            found["error" if name == "small" else "error_dense"] = _onnx_error(session, data.test)
    found["ratio_onnx"] = found["onnx_bytes_dense"] / found["onnx_bytes_small"]
    for size in (1, 128):
        found[f"speedup_onnx_{size}"] = timings["dense"][size] / timings["small"][size]
        slow, fast = (_torch_milliseconds(model, example[:size]) for model in (dense, small))
        found[f"speedup_torch_{size}"] = slow / fast
    found["macs"] = [dubito.uses.compression.report.num_macs(model, example) for model in (dense, small)]
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
