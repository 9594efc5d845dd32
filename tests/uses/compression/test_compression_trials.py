"""What users ran into: units and weight updates, networks that are not plain, and input that does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import fit, point, table
from dubito.compression import compress
from dubito.errors import DubitoError, InputError, UnsupportedError
from dubito.likelihoods import Bernoulli, Gaussian
from torch import Tensor, nn

from dubito import MAP, Ensemble, Laplace, Training, compression, rules
from dubito.methods.map.posterior import PointPosterior
from dubito.uses.compression.report import num_macs
from extras import needs

HELD_OUT = table(1)
HALF = rules.Magnitude(0.4, scope="layer")


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


class Gated(nn.Module):
    """Units are multiplied by something of the data: no unit is a constant when nothing comes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() * x.sum(1, keepdim=True))


class Keyword(nn.Module):
    """A layer is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=self.a(x).relu())


class Frozen(nn.Module):
    """The first layer is called without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.a(x).relu()
        return self.b(features)


# ---------------------------------------------------------------------- units


@pytest.mark.parametrize("how", ["masked", "to_torch"])
def test_masks_of_units_are_the_small_network(how: str) -> None:
    """What comes into a unit is masked; what goes out stays, or the constant that it has become would be lost."""
    posterior, (x, _) = copy.deepcopy(fit("diag")), HELD_OUT
    with torch.no_grad():
        posterior.model[0].bias.add_(0.5)  # type: ignore[index, union-attr, operator]
    made = compress(posterior, rules.SignalToNoise(target=0.5, scope="layer"), structure="units", data=HELD_OUT)
    same = getattr(made.plan, how)(made.dense).eval()
    torch.testing.assert_close(same(x), made.model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_what_is_left_makes_up_for_units_that_went(structure: str) -> None:
    """The layers that read them adapt, also under a posterior with independent weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator, dtype=torch.float64)
    y = x[:, :1].sin() + 0.05 * torch.randn(400, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    training = Training(epochs=60, lr=1e-2, batch_size=50)
    whole = MAP(prior_precision=1.0).fit(model, (x, y), likelihood=Gaussian(), training=training, progress=False)
    recipe = Laplace(structure=structure, prior_precision=1.0)  # type: ignore[arg-type]
    posterior = recipe.fit(whole.model, (x, y), likelihood=whole.likelihood, progress=False)
    rule = rules.PosteriorDamage(0.3, kind="obs")
    left, moved = (compress(posterior, r, structure="units", data=(x, y)) for r in (rule, rule.replace(update=True)))

    far, near = (float((small.model(x) - whole.model(x)).detach().square().mean().sqrt()) for small in (left, moved))
    assert near < 0.3 * far


@pytest.mark.parametrize("rule", [rules.SignalToNoise(target=0.4), rules.PosteriorDamage(0.4), rules.Magnitude(0.4)])
def test_weights_that_went_before_have_no_say(rule: rules.Rule) -> None:
    """They neither hold a unit nor condemn it: compressing twice counts units as compressing once does."""
    first = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    again = first.posterior(Laplace(structure="diag", prior_precision=1.0), table())
    made = compress(again, rule, structure="units", data=HELD_OUT)
    gone = sum(int((~mask).sum()) for mask in made.plan.units.values())
    assert gone == round(0.4 * (8 + 6))


def test_one_row_is_not_believed() -> None:
    """On one row every unit looks like a constant."""
    torch.manual_seed(0)
    posterior, x = point(Gated().eval()), torch.randn(50, 5)
    needs("torch_pruning")
    made = compress(posterior, HALF, structure="units", example=x[:1])
    torch.testing.assert_close(made.plan.masked(made.dense)(x), made.model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Linear(8, 3)), (5,)),
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 3)), (5,)),
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 3)), (5,)),
        (Keyword, (5,)),
        (Frozen, (5,)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(),
                nn.Flatten(), nn.Linear(96, 3),
            ),
            (1, 8, 8),
        ),
    ],
    ids=["norm without gains", "prelu", "glu", "keyword", "frozen", "grouped"],
)  # fmt: skip
def test_networks_that_are_not_plain(model: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network, x = model().eval(), torch.randn(20, *shape)
    made = compress(point(network), HALF, structure="units", example=x[:9])
    assert made.plan.units
    torch.testing.assert_close(made.plan.masked(made.dense)(x), made.model(x), rtol=0, atol=1e-5)
    made.report(seconds=0.001)
    weights = compress(point(network), HALF, example=x[:9])
    assert weights.report(seconds=0.001).nonzeros < sum(p.numel() for p in network.parameters())


def test_a_network_that_keeps_its_units() -> None:
    torch.manual_seed(0)
    network = Tied().eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(UnsupportedError, match=r"No layer of this network can lose units|needs torch-pruning"):
        compress(point(network), HALF, structure="units", example=torch.randn(16, 5))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# ---------------------------------------------------------------------- files and reports


def test_tied_weights_are_saved_reported_and_pruned_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, x = compress(point(Tied().eval()), HALF, example=HELD_OUT[0]), HELD_OUT[0]
    for format in ("dense", "csr", "coded"):
        made.save(tmp_path / format, format=format)  # type: ignore[arg-type]
        again = compression.load(tmp_path / format, Tied())
        assert again.a.weight is again.b.weight
        torch.testing.assert_close(again(x), made.model(x), rtol=0, atol=0.1 if format == "coded" else 1e-6)
    made.report(seconds=0.001)
    pruned = made.plan.to_torch(made.dense).eval()
    torch.testing.assert_close(pruned(x), made.model(x))


def test_units_left_are_those_that_anything_comes_into() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1:3] = 1e-6
    made = compress(point(model.eval()), rules.Magnitude({"0": 0.5}), example=HELD_OUT[0])
    row = next(row for row in made.report(seconds=0.001).layers if row.name == "0.weight")
    assert (row.units, row.units_kept) == (4, 2)


def test_operations_of_any_network() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(self.a(x)))

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.words(x))[0][:, -1])

    assert num_macs(Twice().eval(), torch.randn(3, 5)) == 5 * 5 + 5 * 5 + 5 * 3
    assert num_macs(Reader().eval(), torch.randint(20, (3, 7))) == 7 * (24 * 8 + 24 * 6) + 6 * 2
    transposed = nn.Sequential(nn.ConvTranspose2d(2, 3, 3)).eval()
    assert num_macs(transposed, torch.randn(2, 2, 5, 5)) == 25 * 2 * 3 * 9
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    assert num_macs(encoder, torch.randn(2, 5, 16)) == 5 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 5 * 5 * 16


def test_half_precision_and_sizes() -> None:
    small, wide = (nn.Sequential(nn.Linear(5, n), nn.ReLU(), nn.Linear(n, 3)).eval() for n in (40, 400))
    report = compress(point(small), rules.Magnitude(0.3), example=HELD_OUT[0]).report(seconds=0.001)
    assert report.num_bytes["csr"] <= report.num_bytes["dense"]
    rule = rules.Magnitude(0.9, scope="layer")
    report = compress(point(wide.bfloat16()), rule, example=HELD_OUT[0].bfloat16()).report(seconds=0.001)
    assert report.num_bytes["csr"] < report.num_bytes["dense"]


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        (nn.Linear(5, 3), {}, "compress takes a posterior, not a Linear"),
        (None, {}, "compress takes a posterior, not a NoneType"),
        ("diag", {"training": Training(epochs=1)}, "give the training data as finetune="),
        ("diag", {"data": (torch.zeros(3, 7), torch.zeros(3).long())}, "cannot be called on a batch of inputs"),
        ("diag", {"data": (torch.full((3, 5), torch.nan), torch.zeros(3).long())}, "inputs hold NaN"),
        ("diag", {"data": table()[0], "rule": rules.SignalToNoise(max_drop=0.1)}, "no targets"),
        (
            "diag",
            {"finetune": table(), "teacher": fit("point"), "temperature": "2"},
            "`temperature` must be a number",
        ),
    ],
)
def test_one_sentence(given: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(DubitoError, match=says):
        compress(fit(given) if isinstance(given, str) else given, **options)


@pytest.mark.parametrize(("own", "other"), [(Gaussian(noise=1.0), Bernoulli()), (Bernoulli(), Gaussian(noise=1.0))])
def test_a_teacher_of_another_task(own: Any, other: Any) -> None:
    model, (x, _) = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)), table()
    mine, teacher = (PointPosterior(copy.deepcopy(model).eval(), one, MAP(), 100) for one in (own, other))
    with pytest.raises(InputError, match="use a teacher of the same task"):
        compress(mine, rules.Magnitude(0.5), finetune=(x, (x[:, :1] > 0).float()), teacher=teacher)


def test_sweeps_and_exports_that_cannot_be_made(tmp_path: Path) -> None:
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5), data=HELD_OUT)
    with pytest.raises(InputError, match="`targets` is empty"):
        made.sweep(targets=())
    with pytest.raises(InputError, match="does not exist: create it first"):
        made.export(tmp_path / "nowhere" / "small.pt2")


def test_any_posterior_on_a_network_that_lost_units() -> None:
    """No weight is to be held at zero, so every recipe will do; single weights that went need one with a choice."""
    training = Training(epochs=2, batch_size=30)
    units = compress(fit("diag"), HALF, structure="units", data=HELD_OUT)
    members = units.posterior(Ensemble(members=2), table(), training=training)
    assert members.predict(HELD_OUT[0]).probs.shape == (120, 3)
    with pytest.raises(UnsupportedError, match="cannot keep the removed weights at zero"):
        compress(fit("diag"), HALF, data=HELD_OUT).posterior(Ensemble(members=2), table(), training=training)
