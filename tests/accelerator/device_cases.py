"""What runs on the stand-in accelerator, in a process of its own: `device_cases.py LIBRARY WHAT ...` prints JSON."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from accelerator import stand_in
from contracts.test_posterior_contract import RECIPES, TASKS, TRAINING, network, problem, quantities, refused
from dubito import (
    DKL,
    HMC,
    MAP,
    MIMO,
    SGMCMC,
    SNGP,
    SVGD,
    SWAG,
    VBLL,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Packed,
    Posterior,
    Rank1,
    Snapshot,
    Training,
    Variational,
    decisions,
    priors,
    rules,
    select,
)
from dubito.core import io, limits
from dubito.core.widest import has_double
from dubito.fitting.recipe import Recipe

Answers = dict[str, Callable[[], Any]]


ONCE = TRAINING.replace(epochs=1)


def fit(recipe: Recipe, task: str, device: torch.device) -> tuple[Posterior, nn.Module]:
    """Fit a tiny network on a device to data on the CPU, as most users have it; chains are short, particles few."""
    if isinstance(recipe, (SGMCMC, HMC)):
        recipe = recipe.replace(burn_in=4, num_samples=6)
    elif isinstance(recipe, SVGD):
        recipe = recipe.replace(num_particles=3)
    likelihood: Any = "categorical" if task == "classification" else "gaussian"
    data, validation = problem(task, torch.float32), problem(task, torch.float32, 1)
    trained = recipe.needs_trained_model
    model = trained_network(task, device) if trained else network(task, torch.float32).to(device)
    training = None if trained else TRAINING
    options: Any = {"likelihood": likelihood, "validation": validation, "training": training}
    generator = torch.Generator(device).manual_seed(1) if task == "regression" else None  # one of the CPU by default
    return recipe.fit(model, data, generator=generator, progress=False, **options), model


@cache
def trained_network(task: str, device: torch.device) -> nn.Module:
    likelihood: Any = "categorical" if task == "classification" else "gaussian"
    model = network(task, torch.float32).to(device)
    return MAP().fit(model, problem(task, torch.float32), likelihood=likelihood, training=TRAINING).model


def uses(posterior: Posterior, model: nn.Module, task: str, device: torch.device) -> Answers:
    """Return what is asked of a posterior, by name."""
    x, y = problem(task, torch.float32)
    here = (x.to(device), y.to(device))

    def save_and_load() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            posterior.save(Path(folder) / "posterior")
            again = dubito.load(Path(folder) / "posterior", model)
            assert again.digest() == posterior.digest() or not has_double(device)
            return again.predict(x)

    return {
        "predict": lambda: posterior.predict(x),
        "predict from the device": lambda: posterior.predict(here[0], batch_size=20),
        "sample": lambda: posterior.sample(3),
        "sample by the device": lambda: posterior.sample(3, generator=torch.Generator(device)),
        "predict by the device": lambda: posterior.predict(x, generator=torch.Generator(device)),
        "marginals": posterior.marginals,
        "prior": posterior.prior,
        "log_evidence": posterior.log_evidence,
        "precision_diagonal": posterior.precision_diagonal,
        "conditional_mean": lambda: posterior.conditional_mean(
            {"0.weight": torch.arange(24, device=device).reshape(6, 4) % 3 > 0}
        ),
        "update": lambda: posterior.update(here, training=ONCE, progress=False),
        "diagnose": posterior.diagnose,
        "evaluate": lambda: dubito.evaluate(posterior, (x, y), ood={"noise": 3 * x}),
        "compress": lambda: dubito.compress(posterior, data=(x, y), allow_empty=True),
        "save and load": save_and_load,
    }


def check_devices(found: Any, device: torch.device, kind: str) -> None:
    """Raise if a tensor of an answer lies on another device."""
    tensors: Iterator[Any] = iter(())
    if kind.split()[0] in ("sample", "marginals", "prior", "precision_diagonal", "conditional_mean"):
        tensors = io.tensors(list(found) if isinstance(found, tuple) else found)
    elif hasattr(found, "aleatoric"):
        tensors = iter(quantities(found).values())
    for each in tensors:
        assert each.device == device, f"an answer lies on {each.device}"
        assert bool(each.isfinite().all()), "an answer is not finite"


def failures(recipe: Recipe, task: str, device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield the uses that fail, each with its error."""
    try:
        posterior, model = fit(recipe, task, device)
    except Exception:  # noqa: BLE001 (reported)
        yield repr(recipe), f"fit, {task}", traceback.format_exc()
        return
    for name, use in uses(posterior, model, task, device).items():
        try:
            check_devices(use(), device, name)
        except dubito.errors.UnsupportedError:
            if name.split()[0] not in refused(recipe) and name != "compress":
                yield repr(recipe), f"{name}, {task}", traceback.format_exc()
        except Exception:  # noqa: BLE001 (reported)
            yield repr(recipe), f"{name}, {task}", traceback.format_exc()


class Tokens(nn.Module):
    """A network with embeddings and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Parameter(torch.zeros(1, 5, 4))
        self.mix, self.out = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.words(x) + self.places).mean(1))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return networks of other layers, with inputs."""
    torch.manual_seed(0)
    images = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(12, 3),
    )
    pixels, tokens = torch.randn(20, 1, 6, 6), torch.randint(7, (20, 5))
    dense = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 3, 1))
    return {"images": (images, pixels), "tokens": (Tokens(), tokens), "pixels": (dense, pixels)}


def other_networks(device: torch.device) -> Answers:
    """Return fits and predictions of other networks with a few recipes."""
    recipes = [
        Laplace(), Laplace(structure="diag", curvature="fisher-mc"), Variational(), Rank1(components=2), MCDropout(0.1),
        Laplace(weights=select.subnetwork(8), structure="full"), SGMCMC(burn_in=4, num_samples=4, thinning=1),
        SWAG(collect_every=1),
    ]  # fmt: skip
    found: Answers = {}
    for name, (given, x) in networks().items():
        y = torch.randint(3, (20, 6, 6) if name == "pixels" else (20,))

        def run(recipe: Recipe, given: nn.Module = given, x: Tensor = x, y: Tensor = y) -> Any:
            model = copy.deepcopy(given).to(device)
            training = None if recipe.needs_trained_model else Training(epochs=3, lr=1e-2, batch_size=10)
            return recipe.fit(model, (x, y), training=training, progress=False).predict(x, num_samples=3)

        found |= {f"{name}: {recipe!r}": partial(run, recipe) for recipe in recipes}
    return found


def other_uses(device: torch.device) -> Answers:
    """Return what else is done with selections and posteriors."""
    data, model = problem("classification", torch.float32), network("classification", torch.float32).to(device)
    x, y = data
    here = (x.to(device), y.to(device))
    chosen = [
        select.subnetwork(6), select.subnetwork(6, rule="greedy"), select.subnetwork(0.3, per_layer="proportional"),
        select.largest_variance(6), select.largest_magnitude(6), select.layers("3") | select.random(4),
    ]  # fmt: skip
    gaussian = Laplace().fit(model, data, progress=False)
    variational = Variational().fit(model, here, training=TRAINING)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(device)
    chain = MAP().fit(plain, data, training=TRAINING)
    cut = rules.Magnitude(0.3)
    student = nn.Linear(4, 3).to(device)
    return {
        **{repr(rule): partial(rule.resolve, model, data, dubito.likelihoods.Categorical()) for rule in chosen},
        **{f"report {rule!r}": partial(rule.report, model, data) for rule in chosen},
        "trajectory": lambda: SGMCMC(weights=select.subspace(3, epochs=4), burn_in=3, thinning=1, num_samples=3).fit(
            model, data
        ),
        "MAP by evidence": lambda: MAP().fit(
            model, data, training=TRAINING.replace(evidence_every=1, evidence_burn_in=1)
        ),
        "Hessian": lambda: Laplace(structure="full", curvature="hessian").fit(model, data),
        **{link: lambda link=link: gaussian.predict(x, link=link) for link in ("mc", "bridge", "bridge-norm")},
        "weights": lambda: gaussian.predict(x, method="weights"),
        "functional": lambda: gaussian.functional_samples(x, 3, joint=True),
        "units": lambda: dubito.compress(chain, cut, structure="units", data=here).model(here[0]),
        "fine-tune": lambda: dubito.compress(
            variational, rules.SignalToNoise(0.5), finetune=data, training=TRAINING
        ).report(),
        "quantize": lambda: dubito.compress(variational, cut).bits(),
        "temper": lambda: decisions.temper(gaussian, data).predict(x),
        "sets": lambda: decisions.ConformalSets(gaussian, data, method="raps", randomized=True).predict(x),
        "reject": lambda: decisions.Rejector(gaussian, data, risk=0.9).predict(x),
        "detect": lambda: decisions.Detector(gaussian, data).detect(here[0]),
        **{way: lambda way=way: dubito.acquire(gaussian, x, 3, way) for way in ("entropy", "bald", "batchbald")},
        "distill": lambda: dubito.distill(gaussian, student, data, training=TRAINING),
        "report": lambda: report(gaussian, data),
        "compare": lambda: dubito.compare(model, data, {"map": MAP()}, seeds=1, test=data, training=TRAINING),
        "a chain that diverges": lambda: diverges(model, data),
        "the same again": lambda: same_again(model, data),
        "a logger": lambda: MAP().fit(model, data, training=TRAINING.replace(log=lambda numbers: None)),
        "float64": lambda: Laplace().fit(model.double(), problem("classification", torch.float64)),
    }


def diverges(model: nn.Module, data: Any) -> None:
    """Check that a chain that diverges ends in its own error, though it is noticed late and an epoch is one step."""
    try:
        SGMCMC(step_size=1e9, burn_in=60, num_samples=2).fit(model, data, training=Training(batch_size=45))
    except dubito.errors.NonFiniteError as error:
        assert "Chain 1 of 1 diverged in step" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("nothing was noticed")


def same_again(model: nn.Module, data: Any) -> None:
    """Check that a network with dropout gives the same posterior twice, and that the user's generators stay."""
    network = nn.Sequential(model, nn.Dropout(0.5))
    before = torch.ops.stand_in.rng_state()
    first, second = (MAP().fit(network, data, training=TRAINING).digest() for _ in range(2))
    assert first == second
    assert torch.equal(before, torch.ops.stand_in.rng_state())


def report(posterior: Posterior, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dubito.report({"laplace": dubito.evaluate(posterior, data)}, path=Path(folder) / "report.html")


def failed(answers: Answers) -> Iterator[tuple[str, str, str]]:
    """Yield the answers that raise."""
    for name, answer in answers.items():
        try:
            answer()
        except Exception:  # noqa: BLE001 (reported)
            yield name, "", traceback.format_exc()


TRAINED = [
    MAP(), Variational(), Variational(optimizer="natural", biases="random"), Variational(family="low-rank", rank=3),
    Variational(prior=priors.Horseshoe(scale=0.1, groups="outputs"), estimator="weight"), Rank1(components=2),
    BatchEnsemble(), SWAG(rank=2, collect_every=5), Snapshot(cycles=2), MCDropout(learn=True, filterwise=False),
    MAP(prior=priors.FunctionSpace(num_context=6)), SVGD(num_particles=3), VBLL(), SNGP(num_features=16),
    DKL(inducing=8), Packed(members=2), MIMO(members=2),
]  # fmt: skip
SAMPLERS = [SGMCMC(kernel, num_samples=3, thinning=2) for kernel in ("sghmc", "sgld", "psgld", "sgnht")]
TRAJECTORIES = [HMC(kind, chains=1, burn_in=5, num_steps=4, max_depth=4) for kind in ("hmc", "microcanonical", "nuts")]
LOOKED_AT = [
    Laplace(), Laplace(structure="ekfac"), Laplace(structure="diag"),
    Laplace(weights=select.last_layer(), structure="full"),
    Laplace(structure="low-rank", rank=3), Laplace(weights=select.subnetwork(5), structure="full"),
    Laplace(structure="sampled", draws=2, steps=3),
    Laplace(prior=priors.FunctionSpace(num_context=6)),
]  # fmt: skip


def reads(device: torch.device) -> dict[str, dict[str, float]]:
    """Return reads of the device by the host: per training step, per transition of a sampler, per predicted batch."""
    data, model = problem("classification", torch.float32), network("classification", torch.float32).to(device)
    here = data[0].to(device)

    def fitted(recipe: Recipe, **options: Any) -> tuple[int, Posterior]:
        before = stand_in.host_reads()
        posterior = recipe.fit(model, data, progress=False, **options)
        return stand_in.host_reads() - before, posterior

    def per_batch(posterior: Posterior) -> float:
        def count(size: int) -> int:
            before = stand_in.host_reads()
            assert sum(len(each) for each in posterior.predict_batches(here, batch_size=size)) == 45
            return stand_in.host_reads() - before

        count(45)  # what is computed once
        return (count(5) - count(45)) / 8

    found: dict[str, dict[str, float]] = {"step": {}, "short": {}, "transition": {}, "batch": {}}
    for recipe in TRAINED:  # 23 steps per epoch, then 5
        counts = [fitted(recipe, training=Training(epochs=n, lr=1e-3, batch_size=10))[0] for n in (4, 12)]
        found["short"][repr(recipe)] = (counts[1] - counts[0]) / 40
        epochs = (2, 3) if isinstance(recipe, (SWAG, Snapshot)) else (1, 2)
        short, long = (fitted(recipe, training=Training(epochs=n, lr=1e-3, batch_size=2)) for n in epochs)
        found["step"][repr(recipe)] = (long[0] - short[0]) / 23
        found["batch"][repr(recipe)] = per_batch(long[1])
    for sampler in SAMPLERS:
        short, long = (fitted(sampler.replace(burn_in=count), training=Training(batch_size=2)) for count in (20, 70))
        found["transition"][repr(sampler)] = (long[0] - short[0]) / 50
    for chain in TRAJECTORIES:
        short, long = (fitted(chain.replace(num_samples=count)) for count in (5, 55))
        found["transition"][repr(chain)] = (long[0] - short[0]) / 50
    with limits.using(exact_block=0):  # so that "ekfac" has eigenbases
        found["batch"] |= {repr(recipe): per_batch(fitted(recipe)[1]) for recipe in LOOKED_AT}
    return found


MAIN = [
    MAP(), Ensemble(2), Laplace(weights=select.last_layer(), structure="full"), Laplace(structure="diag"), Laplace(),
    Laplace(structure="low-rank", rank=3), SWAG(rank=2, collect_every=1), MCDropout(0.2),
    Variational(), Variational(optimizer="natural"), Rank1(components=1), SGMCMC("sghmc", thinning=1),
]  # fmt: skip


def without_double(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield what fails on a device without float64, or differs from the CPU, where sums are in float64."""
    for k, recipe in enumerate(MAIN):
        yield from failures(recipe, TASKS[k % 2], device)
    data, model = problem("classification", torch.float32), network("classification", torch.float32)
    for structure in ("kron", "diag", "full"):
        for recipe in (Laplace(structure=structure), Laplace(structure=structure, prior_precision=1e-2)):
            near, far = (recipe.fit(copy.deepcopy(model).to(where), data, progress=False) for where in ("cpu", device))
            expected, found = (each.predict(data[0]) for each in (near, far))
            for name in ("probs", "epistemic"):
                difference = (getattr(expected, name) - getattr(found, name).cpu()).abs().max()
                if not float(difference) < 1e-4:
                    yield repr(recipe), name, f"differs from the CPU by {float(difference)}"
    yield from failed({structure: partial(small_terms, structure, device) for structure in STRUCTURES})
    left_out = {"float64", "the same again"}
    yield from failed({name: use for name, use in other_uses(device).items() if name not in left_out})
    yield from failed(dict(list(other_networks(device).items())[::3]))  # each recipe once, on one of the networks
    if takes_double(device):
        yield "the user's own code", "", "float64 was not refused outside of Dubito"


STRUCTURES = ("diag", "full", "kron", "ekfac", "low-rank")


def small_terms(structure: str, device: torch.device) -> None:
    """Check a sum of one large and many small terms, each of which plain float32 would round away."""
    x = torch.full((64, 1), 7.9)
    x[0] = 2**15.01  # its square is just above 2³⁰, where float32 has steps of 128
    model = nn.Linear(1, 1, bias=False)
    recipe = Laplace(structure=structure, prior_precision=1.0, rank=1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, model(x).detach()), batch_size=1)
    plain, expected = torch.zeros(()), float(x.double().square().sum())
    for term in x.square().flatten():
        plain += term
    assert abs(float(plain) / expected - 1) > 3e-6, "plain float32 is enough here"
    likelihood: Any = dubito.likelihoods.Gaussian(noise=1.0)
    with limits.using(exact_block=0):
        found = recipe.fit(model.to(device), loader, likelihood=likelihood, progress=False)
    total = float(found.precision_diagonal()["weight"]) - 1.0
    assert abs(total / expected - 1) < 3e-7, f"{total} instead of {expected}"


def takes_double(device: torch.device) -> bool:
    """Return whether the device takes float64 here, outside of Dubito."""
    try:
        torch.ones((), dtype=torch.float64, device=device)
    except TypeError:
        return False
    return True


def main() -> None:
    """Run the cases that are asked for, and print as JSON what failed, or the reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("what", choices=("recipes", "networks", "uses", "reads", "no-double"), nargs="+")
    parser.add_argument("--all", action="store_true", help="every recipe in both tasks, not one after the other")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = stand_in.start(given.library, double="no-double" not in given.what)
    tasks = {recipe: TASKS if given.all else (TASKS[k % 2],) for k, recipe in enumerate(RECIPES)}
    cases: Answers = {
        "recipes": lambda: [f for recipe in tasks for task in tasks[recipe] for f in failures(recipe, task, device)],
        "networks": lambda: list(failed(other_networks(device))),
        "uses": lambda: list(failed(other_uses(device))),
        "reads": lambda: reads(device),
        "no-double": lambda: list(without_double(device)),
    }
    print(json.dumps({what: cases[what]() for what in given.what}))


if __name__ == "__main__":
    main()
