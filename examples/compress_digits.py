"""Compress a network trained on digits into a small, fast one with uncertainty: under a minute on a CPU.

    python examples/compress_digits.py [--picture docs/img/compress.png]

1. Sparse variational dropout removes most weights; the file shrinks.
2. A pruning rule of the posterior removes units; the network gets smaller and faster.
3. A new posterior is fitted over the weights of the small network.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import dubito
from dubito import MAP, Laplace, Training, Variational, data, models, priors, rules


def draw(posterior: dubito.Posterior, dataset: data.DataSet, path: str) -> None:
    """Draw the accuracy against the share of weights that a rule removes, without fine-tuning."""
    from dubito.uses.reporting import plots

    curves = {}
    for rule in (rules.PosteriorDamage(0.5), rules.Magnitude(0.5), rules.Random(0.5)):
        sweep = dubito.compress(posterior, rule).sweep(dataset.test)
        curves[type(rule).__name__] = [{100 * s: score for s, score in zip(sweep.sparsity, sweep.score, strict=True)}]
    figure = plots.shift(curves, score="Test accuracy")
    figure.axes[0].set_xlabel("Weights removed (%), no fine-tuning")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default=None)
    picture = parser.parse_args().picture
    torch.manual_seed(0)
    digits = data.load("digits")
    trained = MAP(prior_precision=1.0).fit(
        models.mlp(64, 10, hidden=(100, 50)), digits.train, training=Training(epochs=30, batch_size=64), progress=False
    )

    sparse = Variational(prior=priors.LogUniform(), initial_scale=0.0067, kl_warmup=0.5).fit(
        trained.model, digits.train, training=Training(epochs=100, lr=2e-3, batch_size=64), progress=False
    )
    small = dubito.compress(sparse, data=digits.validation)
    print("Single weights, by the posterior's own rule\n" + str(small.report(digits.test)))

    kron = Laplace(structure="kron").fit(trained.model, digits.train, progress=False)
    fast = dubito.compress(
        kron, rules.PosteriorDamage(0.6, scope="layer"), structure="units", data=digits.validation,
        finetune=digits.train, training=Training(epochs=40, lr=1e-3, batch_size=64),
    )  # fmt: skip
    print("\nWhole units, fine-tuned\n" + str(fast.report(digits.test)))

    again = fast.posterior(Laplace(structure="kron"), digits.train, validation=digits.validation)
    scores = dubito.evaluate(again, digits.test).scores
    if picture:
        draw(kron, digits, picture)
    print(f"\nThe small network with a posterior: NLL {scores['nll']:.4f}, ECE {scores['ece']:.4f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.dubito"
        size = small.save(path)
        loaded = dubito.compression.load(path, trained.model)
        right = (loaded(digits.test[0]).argmax(1) == digits.test[1]).double().mean()
        print(f"The sparse network is {size:,} bytes on disk; loaded again its accuracy is {right:.4f}.")


if __name__ == "__main__":
    main()
