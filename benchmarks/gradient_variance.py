"""Variance of the gradient of the expected log-likelihood under each estimator, on the same network and batch.

python benchmarks/gradient_variance.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dubito import MAP, data, models
from dubito.methods.variational import convert

DRAWS, SCALE = 300, 0.1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = data.load("digits")
    network = MAP().fit(models.mlp(64, 10, hidden=(100, 100)), digits.train, progress=False).model
    inputs, targets = (part[:128] for part in digits.train)
    print(f"Variance of the gradient, summed over weights; 64-100-100-10, 128 digits, scale {SCALE}, {DRAWS} draws")
    print(f"{'':10}{'means':>12}{'log-scales':>14}")
    for estimator in ("local", "flipout", "weight"):
        module = convert(network, estimator=estimator, initial_scale=SCALE)
        names, values = zip(*module.named_parameters(), strict=True)
        torch.manual_seed(0)
        draws = [torch.autograd.grad(F.cross_entropy(module(inputs), targets), values) for _ in range(DRAWS)]
        noise = {"network": 0.0, "posterior": 0.0}
        for index, name in enumerate(names):
            noise[name.split(".")[0]] += float(torch.stack([draw[index] for draw in draws]).var(0).sum())
        print(f"{estimator:10}{noise['network']:12.3g}{noise['posterior']:14.2g}")


if __name__ == "__main__":
    main()
