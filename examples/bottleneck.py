"""What a code must keep of an image to tell the digit: the curve of the variational information bottleneck on MNIST.

    python examples/bottleneck.py --seeds 3 --picture docs/img/bottleneck.png

A network 784-256-code-10 is trained on 10,000 images for each β with `objectives.ELBO` on a network with a
`variational.Bottleneck` of 32 numbers. The rate, the mean divergence of the codes of test images, bounds from above how
many bits the code keeps of an image. The entropy of the labels minus the test loss bounds from below how many bits it
tells of the label, of which there are log2(10) = 3.32. Nothing was tuned on test images.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from dubito import data, objectives, variational

BETAS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
TRAINED, EPOCHS, BATCH, DRAWS, NAT = 10_000, 10, 100, 8, 1 / math.log(2)


def fit(inputs: Tensor, labels: Tensor, beta: float, seed: int) -> nn.Module:
    """Train one network."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), variational.Bottleneck(256, 32), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    objective = objectives.ELBO()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            objective(model, inputs[rows], labels[rows], num_data=len(inputs), temperature=beta).backward()
            optimizer.step()
    return model


@torch.no_grad()
def measure(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the rate and the information about the label in bits, and the errors with one code and with many."""
    model.train()  # codes are drawn
    log_probs = torch.stack([model(inputs).log_softmax(-1) for _ in range(DRAWS)])
    chosen = log_probs[..., torch.arange(len(labels)), labels]
    shares = labels.bincount() / len(labels)
    entropy = -float((shares * shares.log()).sum())
    average = log_probs.logsumexp(0)
    return {
        "rate": float(model[3].divergence.mean()) * NAT,
        "told": (entropy + float(chosen.mean())) * NAT,
        "error": float((log_probs[0].argmax(-1) != labels).float().mean()),
        "error_of_average": float((average.argmax(-1) != labels).float().mean()),
        "error_of_mean": float((model.eval()(inputs).argmax(-1) != labels).float().mean()),
    }


def draw(rows: list[dict[str, float]], path: str) -> None:
    """Draw the curve."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for panel, name, title in ((left, "told", "bits told of the label"), (right, "error_of_average", "test error")):
        betas = sorted({row["beta"] for row in rows})
        means = [[row for row in rows if row["beta"] == beta] for beta in betas]
        x = [sum(row["rate"] for row in each) / len(each) for each in means]
        panel.plot(x, [sum(row[name] for row in each) / len(each) for each in means], color="C0")
        panel.scatter([row["rate"] for row in rows], [row[name] for row in rows], color="C0", s=12)
        for beta, place, each in zip(betas, x, means, strict=True):
            panel.annotate(f"β={beta:g}", (place, each[0][name]), fontsize=7, textcoords="offset points", xytext=(4, 4))
        panel.set_xscale("log")
        panel.set_xlabel("bits kept of the image (rate)")
        panel.set_title(title)
    left.axhline(math.log2(10), color="grey", linewidth=0.7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure, print a table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--betas", type=float, nargs="*", default=BETAS)
    parser.add_argument("--picture", default="")
    parser.add_argument("--rows", default="", help="A file of JSON lines to which rows are added; known ones are kept.")
    given = parser.parse_args()
    mnist = data.load("mnist")
    (inputs, labels), test = (tuple(part[:TRAINED] for part in mnist.train)), mnist.test
    known = Path(given.rows).read_text().splitlines() if given.rows and Path(given.rows).exists() else []
    rows = [json.loads(line) for line in known]
    for beta in given.betas:
        for seed in range(given.seeds):
            if any(row["beta"] == beta and row["seed"] == seed for row in rows):
                continue
            rows.append({"beta": beta, "seed": seed, **measure(fit(inputs, labels, beta, seed), *test)})
            print(" ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
            if given.rows:
                Path(given.rows).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if given.picture:
        draw(rows, given.picture)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
