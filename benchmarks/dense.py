"""Outputs per pixel and per token: time and peak memory of fit and predict.

    python benchmarks/dense.py [--only NAME] [--rows 8]

Each row is measured in a process of its own: seconds of CPU time, and by how many megabytes the peak memory exceeds
that of the process with network and data in place. U-Net: 128 x 128 pixels, 4 classes (65,536 outputs per example).
Transformer: 32 tokens, a vocabulary of 32,768 (1,048,576 outputs per example). Predictions of the transformer keep the
10 most probable tokens (`top_k=10`).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import peak_memory
from torch import Tensor, nn

from dubito import MAP, Ensemble, Laplace, MCDropout, Variational, select


class UNet(nn.Module):
    """A small U-Net with two levels."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)
        self.raise2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), _block(4 * width, 2 * width)
        self.raise1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2), _block(2 * width, width)
        self.pool, self.drop, self.head = nn.MaxPool2d(2), nn.Dropout(0.1), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, C, H, W]``."""
        first = self.down1(x)
        second = self.down2(self.pool(first))
        second = self.up2(torch.cat([self.raise2(self.middle(self.pool(second))), second], 1))
        return self.head(self.drop(self.up1(torch.cat([self.raise1(second), first], 1))))


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self, vocabulary: int = 32768, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer: Any = {"dim_feedforward": 4 * width, "batch_first": True, "dropout": 0.1, "norm_first": True}
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[B, T, C]``."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]).expand(ids.shape))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(self.norm(x))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


RECIPES: dict[str, Callable[[], Any]] = {
    "Laplace, all weights": Laplace,
    "Laplace, diag": lambda: Laplace(structure="diag"),
    "Laplace, last layer": lambda: Laplace(weights=select.last_layer()),
    "Laplace, last layer, diag": lambda: Laplace(structure="diag", weights=select.last_layer()),
    "MAP": lambda: MAP(),
    "Variational": lambda: Variational(),
    "MCDropout": lambda: MCDropout(),
    "Ensemble of 2": lambda: Ensemble(2),
}


def problem(network: str, rows: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Any]]:
    """Return the network, inputs, targets, and options of its predictions."""
    torch.manual_seed(0)
    if network == "U-Net":
        return UNet(), torch.randn(rows, 3, 128, 128), torch.randint(4, (rows, 128, 128)), {}
    model, ids = Transformer(), torch.randint(32768, (rows, 33))
    return model, ids[:, :-1], ids[:, 1:], {"top_k": 10}


def measured(network: str, recipe: str, rows: int, start: Callable[[], None]) -> None:
    """Fit and predict; print the CPU seconds of both."""
    from dubito import Training

    warnings.simplefilter("ignore")
    model, inputs, targets, options = problem(network, rows)
    made = RECIPES[recipe]()
    training = None if isinstance(made, Laplace) else Training(epochs=1, batch_size=4)
    start()
    begin = time.process_time()
    posterior = made.fit(model, (inputs, targets), training=training, progress=False)
    middle = time.process_time()
    posterior.predict(inputs, **options)
    print(f"{middle - begin:.1f} | {time.process_time() - middle:.1f} | ", end="", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    print(f"| network, {options.rows} examples | recipe | fit, s | predict, s | peak, MB |\n|---|---|---|---|---|")
    for network in ("U-Net", "Transformer"):
        for recipe in RECIPES:
            if options.only in f"{network} {recipe}":
                print(f"| {network} | {recipe} | ", end="", flush=True)
                print(f"{peak_memory(measured, network, recipe, options.rows):.0f} |", flush=True)


if __name__ == "__main__":
    main()
