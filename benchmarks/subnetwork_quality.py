"""Quality of subnetworks: the 1-D figure, UCI regression, and image classifiers under shift, with strong baselines.

    DUBITO_DATA=... python benchmarks/subnetwork_quality.py [--parts figure uci images] [--splits 3]
        [--tasks fashion-mlp fashion-lenet5 mnist-lenet5 cifar10-resnet20] [--seeds 3] [--quick] [--main-rows]

Resumable: each cell is a JSON file in benchmarks/results; existing cells are not computed again. λ (and the noise in
regression) is chosen twice for each posterior, by the evidence and on validation data; never on test data.
"""

from __future__ import annotations

import argparse

import subnetwork_figure
import subnetwork_images
import subnetwork_uci
import torch


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="*", default=["figure", "uci", "images"])
    parser.add_argument("--tasks", nargs="*", default=list(subnetwork_images.TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer images, to train and to test with")
    parser.add_argument("--main-rows", action="store_true", help="only the rows of the shorter table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "figure" in options.parts:
        print(f"drew {subnetwork_figure.draw()}")
    if "uci" in options.parts:
        subnetwork_uci.run(options.splits)
        print(f"\n{subnetwork_uci.table(options.splits)}")
    if "images" in options.parts:
        scale = subnetwork_images.Scale(options.quick, options.main_rows)
        subnetwork_images.run(options.tasks, options.seeds, scale)
        for name in options.tasks:
            print(f"\n{subnetwork_images.table(name, options.seeds, scale)}")


if __name__ == "__main__":
    main()
