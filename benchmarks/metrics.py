"""Cost of the calibration error and of AUROC on a million rows, beside plain torch and the peers, in one run.

One thread, CPU time, variants interleaved: each round runs all variants once and gives one ratio per variant; the table
shows medians over rounds. Run as `python benchmarks/metrics.py`.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dubito import metrics

NUM_ROWS, NUM_CLASSES, NUM_BINS, NUM_ROUNDS = 1_000_000, 10, 15, 15
Variants = dict[str, Callable[[], object]]


def plain_ece(probs: Tensor, targets: Tensor) -> Tensor:
    """The expected calibration error in four lines of torch, without any check."""
    confidence, prediction = probs.max(dim=1)
    index = (confidence * NUM_BINS).long().clamp_(max=NUM_BINS - 1)
    gap = torch.bincount(index, confidence, NUM_BINS) - torch.bincount(index, (prediction == targets).float(), NUM_BINS)
    return gap.abs().sum() / len(targets)


def ece_variants() -> Variants:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(NUM_ROWS, NUM_CLASSES, generator=generator).mul_(2).log_softmax(-1)
    probs = log_probs.exp()
    targets = torch.multinomial(probs, 1, generator=generator)[:, 0]
    accumulator = metrics.ClassificationMetrics(NUM_BINS)
    variants: Variants = {
        "plain torch, four lines": lambda: plain_ece(probs, targets),
        "metrics.ece": lambda: metrics.ece(probs, targets, num_bins=NUM_BINS),
        "metrics.ece equal-mass": lambda: metrics.ece(probs, targets, num_bins=NUM_BINS, binning="equal-mass"),
        "metrics.classwise_ece": lambda: metrics.classwise_ece(probs, targets, num_bins=NUM_BINS),
        "ClassificationMetrics.update": lambda: accumulator.update(log_probs, targets),
    }
    if importlib.util.find_spec("torchmetrics"):
        from torchmetrics.functional.classification import multiclass_calibration_error

        variants["torchmetrics"] = lambda: multiclass_calibration_error(probs, targets, NUM_CLASSES, NUM_BINS)
    return variants


def auroc_variants() -> Variants:
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(NUM_ROWS, generator=generator) < 0.5
    scores = torch.randn(NUM_ROWS, generator=generator) + labels
    variants: Variants = {
        "metrics.auroc": lambda: metrics.auroc(scores, labels),
        "metrics.aupr": lambda: metrics.aupr(scores, labels),
        "scikit-learn AUROC": lambda: roc_auc_score(labels.numpy(), scores.numpy()),
    }
    if importlib.util.find_spec("torchmetrics"):
        from torchmetrics.functional.classification import binary_auroc

        variants["torchmetrics AUROC"] = lambda: binary_auroc(torch.sigmoid(scores), labels.long())
    return variants


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(title: str, variants: Variants) -> None:
    """Time all variants in interleaved rounds and print medians; ratios are to the first variant of the same round."""
    for run in variants.values():
        run()
    rounds = [{name: seconds(run) for name, run in variants.items()} for _ in range(NUM_ROUNDS)]
    baseline = next(iter(variants))
    print(f"\n{title} ({NUM_ROUNDS} rounds, one thread)\n\n| variant | CPU ms | ratio | range |\n|---|---|---|---|")
    for name in variants:
        ratios = [times[name] / times[baseline] for times in rounds]
        cost = 1e3 * statistics.median(times[name] for times in rounds)
        print(f"| {name} | {cost:.1f} | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} |")


def main() -> None:
    torch.set_num_threads(1)
    compare(f"Calibration error, {NUM_ROWS:,} rows of {NUM_CLASSES} classes", ece_variants())
    compare(f"AUROC, {NUM_ROWS:,} scores", auroc_variants())


if __name__ == "__main__":
    main()
