"""Input features of tables that a smaller network does not look at: found, named, and really without effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compression_cases import fit, table
from dubito.compression import Compression, compress
from dubito.errors import InputError
from torch import Tensor, nn

from dubito import MAP, Training, Variational, priors, rules
from dubito.uses.compression.pruner import live_features

NAMES = ("age", "height", "weight", "pulse", "noise")
HELD_OUT = table(1)


def changes(made: Compression | nn.Module, feature: int) -> bool:
    """Whether an output changes with a feature: brute force."""
    model, inputs = made.model if isinstance(made, Compression) else made, HELD_OUT[0]
    other = inputs.clone()
    other[:, feature] += 3.0
    return not torch.equal(model(inputs), model(other))


def check(made: Compression) -> None:
    """Whether the features that are said to be removed are those without effect."""
    found = [changes(made, feature) for feature in range(5)]
    assert made.plan.inputs is not None
    assert made.plan.inputs.tolist() == found


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_inputs_that_nothing_looks_at_are_named(structure: Any) -> None:
    posterior = copy.deepcopy(fit("diag"))
    posterior.model[0].weight.data[:, [1, 4]] = 0.0
    made = compress(posterior, rules.Magnitude({"0": 0.4}), structure=structure, data=HELD_OUT)
    check(made)
    assert made.plan.removed_inputs(NAMES) == ["height", "noise"]
    assert made.plan.removed_inputs() == ["1", "4"]
    assert "height, noise" in str(made.report(feature_names=NAMES, seconds=0.001))
    with pytest.raises(InputError, match="5 input features, but 2 names"):
        made.plan.removed_inputs(("a", "b"))


def test_a_feature_that_only_a_removed_unit_looked_at() -> None:
    posterior = copy.deepcopy(fit("diag"))
    first = posterior.model[0].weight.data
    least = int(first.norm(dim=1).argmin())
    first[least] *= 0.01
    first[torch.arange(8) != least, 3] = 0.0
    assert changes(posterior.model.eval(), 3)
    made = compress(posterior, rules.Magnitude({"0": 1 / 8}), structure="units", data=HELD_OUT)
    assert (~made.plan.units["0"]).nonzero().flatten().tolist() == [least]
    check(made)
    assert made.plan.removed_inputs(NAMES) == ["pulse"]


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_a_removed_feature_stays_removed_in_fine_tuning(structure: Any) -> None:
    posterior = copy.deepcopy(fit("diag"))
    posterior.model[0].weight.data[:, 2] = 0.0
    training = Training(epochs=2, lr=1e-2, batch_size=30)
    options: dict[str, Any] = {"data": HELD_OUT, "finetune": table(), "training": training}
    made = compress(posterior, rules.Magnitude(0.3, scope="layer"), structure=structure, **options)
    check(made)
    assert made.plan.removed_inputs(NAMES) == ["weight"]


def scaled() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    start = MAP().fit(model, table(), training=Training(epochs=10, lr=1e-2, batch_size=30), progress=False)
    recipe = Variational(prior=priors.NormalJeffreys())
    return recipe.fit(start.model, table(), training=Training(epochs=5, lr=1e-2, batch_size=30), progress=False)


def test_a_threshold_removes_features_as_it_does_units() -> None:
    posterior = scaled()
    kinds = {kind.name: (kind.relevance - kind.threshold).double() for kind in posterior.groups()}
    level = float(kinds["0.inputs"].median())
    made = compress(posterior, rules.GroupRelevance({"0": level}), structure="units", data=HELD_OUT)
    check(made)
    gone = [name for name, margin in zip(NAMES, kinds["0.inputs"], strict=True) if margin < level]
    assert made.plan.removed_inputs(NAMES) == gone
    assert len(gone) == 2
    assert not made.plan.keep["0.weight"][:, ~made.plan.inputs].any()


def test_features_are_judged_by_the_weights_to_units_that_stay() -> None:
    posterior = copy.deepcopy(fit("diag"))
    model = posterior.model
    model[0].weight.data[:, 2] = 1e-6  # noise, to all but one unit …
    model[0].weight.data[5, 2] = 2.0
    model[2].weight.data[:, 5] = 1e-6  # … that nothing looks at
    made = compress(posterior, rules.SignalToNoise(1e-4), structure="units", data=HELD_OUT)
    assert (~made.plan.units["0"]).nonzero().flatten().tolist() == [5]
    check(made)
    assert made.plan.removed_inputs(NAMES) == ["weight"]


def test_a_target_counts_units_alone() -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5), structure="units", data=HELD_OUT)
    check(made)
    assert made.plan.removed_inputs() == []


class TwoWays(nn.Module):
    """Inputs also reach the outputs directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.direct = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) + self.direct(x)


def test_a_second_way_through_the_network_is_seen() -> None:
    torch.manual_seed(0)
    model = TwoWays()
    model.first.weight.data[:, [0, 3]] = 0.0
    model.direct.weight.data[:, [1, 3]] = 0.0
    found = live_features(model, HELD_OUT[0])
    assert found is not None
    assert found.tolist() == [changes(model, feature) for feature in range(5)] == [True, True, True, False, True]


def test_inputs_that_are_no_features() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    assert live_features(model, torch.zeros(4, 2, 3)) is None
    assert live_features(nn.Embedding(5, 2), torch.zeros(4, 2, dtype=torch.long)) is None
