"""What the rows of `compression.py` share: resumable cells, and the training of sparse variational dropout."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import channels_last
from torch import nn
from torch.utils.data import DataLoader

import dubito
import dubito.core.io
from dubito import Training, Variational, priors
from dubito.data import DataSet, Pair
from dubito.fitting.posterior import Posterior

RESULTS = Path(__file__).parent / "results" / "compression"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet300": dubito.models.lenet_300_100,
    "lenet5": dubito.models.lenet5,
}


def images(name: str) -> DataSet:
    """A data set of images with 5,000 of its training images held out for validation."""
    return channels_last(dubito.data.load(name, validation=5_000 / 60_000))


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


def sparse_network(kind: str, data: DataSet, name: str, seed: int, epochs: int) -> Posterior:
    """A network trained by sparse variational dropout, as in the published recipe.

    log σ² starts at −10, scales learn at half the rate of means (the papers step in log σ², we in log σ), and the rate
    is constant for half of the time before it falls to zero. The divergence comes in over the first few epochs.
    """
    begin, end = (1, 7) if epochs <= 12 else (0, 5) if epochs < 100 else (5, 20)
    warmup = (begin / epochs, end / epochs)
    recipe = Variational(prior=priors.LogUniform(), initial_scale=math.exp(-5), kl_warmup=warmup, scale_rate=0.5)

    def train(model: nn.Module, path: str) -> Posterior:
        training = Training(epochs=epochs, lr=2e-3, batch_size=200, schedule="hold", checkpoint=path)
        generator = torch.Generator().manual_seed(seed)
        return recipe.fit(model, data.train, training=training, generator=generator, progress=False)

    return fitted(name, seed, network(kind, seed), train)


def train_sparse(
    model: nn.Module,
    train: Pair,
    seed: int,
    epochs: int,
    checkpoint: str,
    *,
    batch_size: int = 200,
    ramp: tuple[float, float] | None = None,
    watch: Callable[[int, Any], None] | None = None,
) -> Posterior:
    """The same in a loop around `variational.convert`, which can watch; the divergence comes in within `ramp`."""
    module = dubito.variational.convert(model, prior=priors.LogUniform(), initial_scale=math.exp(-5))
    rates = {name: 1e-3 if name.endswith("log_scale") else 2e-3 for name, _ in module.named_parameters()}
    groups = [{"params": [p], "lr": rates[name], "peak": rates[name]} for name, p in module.named_parameters()]
    optimizer = torch.optim.Adam(groups, fused=True)
    first = _resume(checkpoint, module, optimizer)
    begin, end = ramp or ((1, 7) if epochs <= 12 else (1, 5) if epochs < 100 else (5, 20))
    x, y = train
    for epoch in range(first, epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        torch.manual_seed(1000 * seed + epoch)
        for step, rows in enumerate(order.split(batch_size)):
            done = epoch + step * batch_size / len(x)
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
    return module.to_posterior(train)


def _keep(path: str, module: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    moments = {str(i): dict(s) for i, s in optimizer.state_dict()["state"].items()}
    dubito.core.io.save(path, "loop", {"epoch": epoch, "module": dict(module.state_dict()), "moments": moments})


def _resume(path: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not Path(path).is_file():
        return 0
    tree = dubito.core.io.load(path, "loop")
    module.load_state_dict(tree["module"])
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {int(i): s for i, s in tree["moments"].items()}})
    return int(tree["epoch"])


def shifted(train: Pair, batch_size: int, most: int = 2) -> DataLoader[Any]:
    """Batches of images that are moved by up to so many pixels, 25 of a batch by the same."""
    x, y = train
    padded = nn.functional.pad(x, (most,) * 4, value=float(x.min()))
    height, width = x.shape[2:]

    def collate(chosen: list[int]) -> Pair:
        rows = torch.tensor(chosen)
        corners = [torch.randint(2 * most + 1, (2,)).tolist() for _ in range(0, len(rows), 25)]
        parts = zip(rows.split(25), corners, strict=True)
        return torch.cat([padded[some, :, i : i + height, j : j + width] for some, (i, j) in parts]), y[rows]

    return DataLoader(range(len(x)), batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def taught(small: nn.Module, large: nn.Module, train: Pair, epochs: int, temperature: float = 2.0) -> nn.Module:
    """The network after so many epochs on the labels and, with the same weight, on the large network's outputs."""
    (x, y), loss = train, nn.functional
    with torch.no_grad():
        answers = torch.cat([large.eval()(some) for some in x.split(500)]) / temperature
    small = copy.deepcopy(small).requires_grad_().train()
    optimizer = torch.optim.Adam(small.parameters(), lr=1e-3, fused=True)
    generator, steps = torch.Generator().manual_seed(0), epochs * -(-len(x) // 100)
    for step, rows in enumerate(
        rows for _ in range(epochs) for rows in torch.randperm(len(x), generator=generator).split(100)
    ):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        outputs = small(x[rows])
        pair = ((outputs / temperature).log_softmax(-1), answers[rows].log_softmax(-1))
        soft = temperature**2 * loss.kl_div(*pair, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        (0.5 * loss.cross_entropy(outputs, y[rows]) + 0.5 * soft).backward()
        optimizer.step()
    return small.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Pair) -> float:
    """The share of examples whose largest output is that of their class."""
    return float((model.eval()(data[0]).argmax(1) == data[1]).double().mean())


def error(model: nn.Module, data: Any) -> float:
    """The error on the test images, in per cent."""
    return 100 * (1 - accuracy(model, data.test))
