"""Samplers in the fit loop: resumed, killed, on disk, by several processes, diverging, on parts of a network."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import mcmc_processes
import pytest
import torch
from dubito.errors import FileFormatError, InputError, NonFiniteError, UnsupportedError
from mcmc_cases import classes, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import HMC, SGMCMC, SVGD, Training, priors, select
from dubito.methods.mcmc.diagnosis import function_traces, weight_name, weight_traces
from dubito.methods.mcmc.plots import plot_autocorrelations, plot_traces
from two_processes import started

pytestmark = pytest.mark.slow

SHORT = {"burn_in": 10, "thinning": 2, "num_samples": 12}
BATCHES = Training(batch_size=20)


def fit(recipe: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> Any:
    options = {"training": BATCHES, "progress": False, **options}
    return recipe.fit(model or network(), data or classes(), **options)


def waves() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=generator)
    return x, torch.sin(2 * x) + 0.1 * (1 + x.abs()) * torch.randn(200, 1, generator=generator)


# Without a search for the number of epochs.
BRIEF = Training(epochs=20, batch_size=20)


def small_network(outputs: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, outputs))


class TestSelections:
    @pytest.mark.parametrize("rule", [select.last_layer(), select.random(10), select.layers("2.weight")], ids=repr)
    @pytest.mark.parametrize("recipe", [SGMCMC(**SHORT), HMC(burn_in=5, num_samples=5, max_depth=3), SVGD(5)], ids=repr)
    def test_only_the_selected_weights_move(self, recipe: Any, rule: Any) -> None:
        model = network()
        options = {"training": BRIEF} if isinstance(recipe, SVGD) else {}
        posterior = fit(recipe.replace(weights=rule), model, **options)
        masks = posterior.selection.masks()
        drawn = posterior.sample(20)
        for name, value in model.named_parameters():
            still = ~masks[name]
            assert (drawn[name][:, still] == value.detach()[still]).all()
            if masks[name].any():
                assert bool((drawn[name].var(0)[masks[name]] > 0).all())

    def test_cached_features_change_nothing(self) -> None:
        x, y = classes()
        recipe = SGMCMC(weights=select.last_layer(), **SHORT)
        plain = Training(batch_size=20, shuffle=False)
        cached = fit(recipe, training=plain)
        loaded = fit(recipe, data=DataLoader(TensorDataset(x, y), batch_size=20), training=plain)
        torch.testing.assert_close(cached.samples, loaded.samples, rtol=1e-9, atol=1e-11)

    def test_predictions_are_the_mixture_of_members(self) -> None:
        x, _ = classes()
        for rule in (select.all(), select.last_layer(), select.random(0.3)):
            posterior = fit(SGMCMC(weights=rule, **SHORT))
            outputs = []
            for index in range(12):
                member = {**dict(posterior.model.named_parameters()), **posterior.member(index)}
                outputs.append(torch.func.functional_call(posterior.model, member, x).softmax(-1))
            torch.testing.assert_close(posterior.predict(x).probs, torch.stack(outputs).mean(0).detach())


class TestFaults:
    def test_a_divergent_chain(self) -> None:
        words = r"Chain 1 of 2 diverged in step \d+ of 34: lower step_size \(now 1e\+12"
        with pytest.raises(NonFiniteError, match=words):
            fit(SGMCMC("sgld", step_size=1e12, chains=2, **SHORT))

    def test_a_sample_with_an_infinite_variance_is_divergence(self) -> None:
        """Its weights and its loss are finite: only the prediction tells that a barely trained network ran away."""
        x, y = waves()
        words = (
            r"^Chain 1 of 1 diverged in step (\d+) of 70: lower step_size \(now [\d.]+\), train the network longer "
            r"first, or check for extreme inputs"
        )
        recipe = SGMCMC("sghmc", burn_in=0, thinning=1, num_samples=70, prior=priors.Normal(), step_size=0.1)
        with pytest.raises(NonFiniteError, match=words) as caught:
            fit(recipe, small_network(2), (x, y), likelihood="heteroscedastic", training=Training(batch_size=32))
        before: Any = caught.value.posterior
        step = int(str(caught.value).split("step ")[1].split()[0])
        assert before.num_particles == step - 1 > 0
        assert bool(before.flat.isfinite().all())
        assert bool(before.predict(x[:16]).stddev.isfinite().all())
        late = recipe.replace(burn_in=step - 1, num_samples=1)  # the first that would be kept
        with pytest.raises(NonFiniteError, match=f"diverged in step {step} of {step}: .* extreme inputs.$"):
            fit(late, small_network(2), (x, y), likelihood="heteroscedastic", training=Training(batch_size=32))

    @pytest.mark.parametrize("kernel", ["sgld", "psgld", "sghmc", "sgnht"])
    def test_where_a_pass_ends_divergence_has_the_same_words(self, kernel: Any) -> None:
        """One batch is one pass, and after each the loop looks for itself whether all is finite."""
        recipe = SGMCMC(kernel, step_size=1e40, chains=2, **SHORT)
        with pytest.raises(NonFiniteError, match=r"Chain \d of 2 diverged in step \d+ of 34: lower step_size"):
            fit(recipe, network(torch.float32), classes(dtype=torch.float32), training=Training(batch_size=60))

    @pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
    def test_regressions_that_stay_are_no_divergence(self, likelihood: str) -> None:
        recipe = SGMCMC("sgld", step_size=1e-3, **SHORT)
        outputs = 1 if likelihood == "gaussian" else 2
        posterior = fit(recipe, small_network(outputs), waves(), likelihood=likelihood)
        assert posterior.num_particles == 12

    def test_samples_from_before_are_not_lost(self) -> None:
        model = network(torch.float32)
        broken = classes(dtype=torch.float32)
        recipe = SGMCMC("sgld", "decay", step_size=0.05, burn_in=4, thinning=1, num_samples=50)
        calls = []

        class Poisoned(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls.append(1)
                return super().forward(x) * (float("nan") if len(calls) > 40 else 1.0)

        with pytest.raises(NonFiniteError, match=r"`.posterior`") as caught:
            fit(recipe, Poisoned(*model), broken)
        kept: Any = caught.value.posterior
        assert 0 < kept.num_particles < 50
        assert bool(kept.flat.isfinite().all())

    @pytest.mark.parametrize(("recipe", "words"), [
        (lambda: SGMCMC("hmc"), "`kernel` must be 'sgld'"),
        (lambda: SGMCMC(schedule="cosine"), "`schedule` must be 'constant'"),
        (lambda: SGMCMC(chains=0), "whole number"), (lambda: SGMCMC(num_samples=2.5), "whole number"),
        (lambda: SGMCMC(temperature=0.0), "positive"), (lambda: SGMCMC(step_size=-1.0), "positive number or 'auto'"),
        (lambda: SGMCMC(friction=2.0), "friction"), (lambda: SGMCMC("psgld", burn_in=0), "preconditioner"),
        (lambda: SGMCMC(weights="all"), "dubito.select"), (lambda: HMC("gibbs"), "`method` must be 'nuts'"),
        (lambda: HMC(adapt="yes"), "True or False"),
        (lambda: HMC(acceptance=1.0), "above 0 and below 1"), (lambda: HMC(burn_in=-1), "of at least 0"),
        (lambda: SVGD(0), "whole number"), (lambda: SVGD(prior=priors.Normal("model"), start="fresh"), "start='model'"),
    ])  # fmt: skip
    def test_bad_settings(self, recipe: Any, words: str) -> None:
        with pytest.raises(InputError, match=words):
            recipe()

    def test_several_modes_have_no_mean(self) -> None:
        posterior = fit(SGMCMC("sghmc", "cyclical", cycles=2, **{**SHORT, "thinning": 1}))
        assert posterior.num_particles == 12
        for ask in (posterior.marginals, lambda: posterior.update(classes())):
            with pytest.raises(UnsupportedError, match="several modes"):
                ask()
        assert "The modes predict differently" in str(posterior.diagnose())

    def test_a_prior_without_moments(self) -> None:
        with pytest.raises(UnsupportedError, match="no finite mean"):
            fit(SGMCMC(prior=priors.Cauchy(0.0, 1.0), **SHORT)).prior()

    def test_batch_norm(self) -> None:
        layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
        model = nn.Sequential(*layers).double()
        for recipe in (HMC(start="fresh"), SVGD(start="fresh")):
            with pytest.raises(UnsupportedError, match="BatchNorm"):
                fit(recipe, model)
        moving = fit(SGMCMC(start="fresh", **SHORT), model)
        assert set(moving.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        means = moving.buffers["1.running_mean"]
        assert means.shape == (1, 12, 6)
        assert bool((means[0, 0] != means[0, -1]).all())
        x, _ = classes()
        member = {**dict(moving.model.named_parameters()), **moving.member(3)}
        expected = torch.func.functional_call(moving.model, member, x)
        assert torch.equal(member["1.running_mean"], means[0, 3])
        outputs = moving.predict(x).samples[3]
        torch.testing.assert_close(outputs.log_softmax(-1), expected.log_softmax(-1).detach())
        held = fit(SGMCMC(**SHORT), model)
        assert not held.buffers


class Interrupted(Exception):
    """What stands for a killed process."""


def stop_after(monkeypatch: pytest.MonkeyPatch, recipe: Any, updates: int) -> None:
    """Let the sampler stop after some updates."""
    from dubito.methods.mcmc.trajectories import Trajectories
    from dubito.methods.mcmc.transitions import Transitions

    owner: Any = Trajectories if isinstance(recipe, HMC) else Transitions
    original, count = owner.update, [0]

    def update(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] > updates:
            raise Interrupted
        return original(self, *args)

    monkeypatch.setattr(owner, "update", update)


RESUMED = [
    SGMCMC("psgld", chains=2, **SHORT),
    SGMCMC("sgnht", "cyclical", memory=1e-6, chains=2, **{**SHORT, "thinning": 1}),
    SGMCMC(start="fresh", chains=2, **SHORT),
    HMC(burn_in=60, num_samples=10, max_depth=3),
    HMC("hmc", burn_in=5, num_samples=10, num_steps=3, memory=1e-6, weights=select.last_layer()),
]


@pytest.mark.parametrize("recipe", RESUMED, ids=repr)
def test_a_stopped_chain_goes_on(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = model if isinstance(recipe, SGMCMC) else network()
    expected = fit(recipe, model)
    training = BATCHES.replace(checkpoint=str(tmp_path / "run"), checkpoint_every=0.0)
    for updates in (7, 5):
        with monkeypatch.context() as patch:
            stop_after(patch, recipe, updates)
            with pytest.raises(Interrupted):
                fit(recipe, model, training=training)
    found = fit(recipe, model, training=training)
    assert found.digest() == expected.digest()
    again = fit(recipe, model, training=training)  # it is done: nothing moves
    assert again.digest() == expected.digest()


def test_lost_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = SGMCMC(memory=1e-6, **SHORT)
    training = BATCHES.replace(checkpoint=str(tmp_path / "run"), checkpoint_every=0.0)
    with monkeypatch.context() as patch:
        stop_after(patch, recipe, 14)
        with pytest.raises(Interrupted):
            fit(recipe, training=training)
    (tmp_path / "run.chain0").unlink()
    with pytest.raises(FileFormatError, match="samples of chain 1 are missing"):
        fit(recipe, training=training)


def test_on_disk_it_is_the_same(tmp_path: Path) -> None:
    recipe = SGMCMC(chains=2, **SHORT)
    inside, outside = fit(recipe), fit(recipe.replace(memory=1e-6))
    assert torch.equal(inside.samples, outside.samples)
    outside.save(tmp_path / "posterior")
    loaded = dubito.load(tmp_path / "posterior", network())
    assert loaded.digest() == outside.digest()
    assert not list(tmp_path.glob("*chain*"))


def killable(target: str, checkpoint: str | None, started: Any) -> None:
    torch.set_num_threads(1)
    training = Training(batch_size=20, checkpoint=checkpoint, checkpoint_every=0.0)
    started.set()
    recipe = SGMCMC("sghmc", chains=2, burn_in=50, thinning=5, num_samples=60, memory=1e-6)
    recipe.fit(network(), classes(), training=training, progress=False).save(target)


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dubito.mcmc"])

    def start(target: Path, checkpoint: Path | None) -> Any:
        started = context.Event()
        process = context.Process(target=killable, args=(str(target), checkpoint and str(checkpoint), started))
        process.start()
        assert started.wait(120)
        return process

    process, began = start(tmp_path / "whole", None), time.monotonic()
    process.join()
    usual = time.monotonic() - began
    for part in (0.3, 0.5):
        process = start(tmp_path / "target", tmp_path / "run")
        time.sleep(part * usual)
        process.kill()
        process.join()
    assert not (tmp_path / "target").exists()
    start(tmp_path / "target", tmp_path / "run").join()
    whole, found = (dubito.load(tmp_path / name, network()) for name in ("whole", "target"))
    assert found.digest() == whole.digest()


def test_chains_by_two_processes_are_those_of_one(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with started(mcmc_processes.__file__, "saved", tmp_path) as wait:
        alone = mcmc_processes.results(tmp_path / "alone")
        first, second = wait()
    for name in alone:
        for rank in range(2):
            found: Any = dubito.load(tmp_path / f"{name}-{rank}", network())
            if name == "svgd":  # rows are shared out and summed: equal up to rounding
                torch.testing.assert_close(found.samples, alone[name].samples, rtol=1e-8, atol=1e-10)
            else:
                assert torch.equal(found.samples, alone[name].samples), name
    assert first == second  # of the run that diverged
    assert "Chain" in first


class TestDiagnosis:
    def test_nothing_is_wrong_with_a_good_run(self) -> None:
        posterior = fit(HMC(burn_in=100, num_samples=250, weights=select.layers("4.bias"), prior=priors.Normal()))
        verdict = posterior.diagnose()
        assert [finding.name for finding in verdict.findings] == ["no better than a constant"], str(verdict)
        assert verdict.function.rhat < 1.05
        assert 0.6 < verdict.acceptance < 1
        assert verdict.divergent == 0

    def test_a_bad_run_is_not(self) -> None:
        posterior = fit(SGMCMC("sgld", step_size=1e-6, chains=2, start="model", **SHORT))
        posterior.trace[0] += 3  # as if chains had gone different ways
        verdict = posterior.diagnose()
        assert not verdict.trustworthy
        assert "Do not use these samples: the chains disagree" in str(verdict)

    def test_one_chain_is_compared_with_itself(self) -> None:
        posterior = fit(SGMCMC("sgld", **SHORT))
        posterior.trace[0] += 10 * torch.arange(12)[:, None]  # it drifts
        assert "Do not use these samples: the halves of the chain disagree" in str(posterior.diagnose())

    def test_what_mixes_worst_is_shown_first(self) -> None:
        posterior = fit(SGMCMC("sgld", chains=2, weights=select.random(9), **SHORT))
        for draws, apart in ((posterior.trace, 5), (posterior.samples, 7)):
            draws.normal_(generator=torch.Generator().manual_seed(0))
            draws[0, :, apart] += 100
        outputs, weight = function_traces(posterior, 3), weight_traces(posterior, 1)[0]
        assert (len(outputs), outputs[0].name) == (3, "output 5")
        assert torch.equal(torch.tensor(outputs[0].values, dtype=torch.float64), posterior.trace[..., 5].double())
        assert torch.equal(torch.tensor(weight.values, dtype=torch.float64), posterior.samples[..., 7].double())
        name, where = weight.name.rstrip("]").split("[")
        place = tuple(int(part) for part in where.split(", "))
        assert posterior.member(3)[name][place] == posterior.samples[0, 3, 7]
        noisy = fit(SGMCMC("sgld", start="fresh", **SHORT), small_network(1), waves(), likelihood="gaussian")
        assert weight_name(noisy, noisy.samples.shape[-1] - 1) == "log noise"

    def test_hot_momenta_are_noticed(self) -> None:
        posterior = fit(SGMCMC("sghmc", friction=0.005, **{**SHORT, "burn_in": 200}), training=Training(batch_size=2))
        verdict = posterior.diagnose()
        assert verdict.momentum_temperature > 1.25
        assert "kernel='sgnht'" in str(verdict)

    def test_few_samples_and_few_particles(self) -> None:
        assert "too few samples" in str(fit(SGMCMC(burn_in=1, thinning=1, num_samples=2)).diagnose())
        assert "5 particles for 83 random weights" in str(fit(SVGD(5), training=BRIEF).diagnose())

    def test_plots(self) -> None:
        posterior = fit(SGMCMC(chains=2, **SHORT))
        for draw in (plot_traces, plot_autocorrelations):
            figure = draw(posterior, num=3)
            assert len(figure.axes) == 3
            lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 12]
            assert len(lines) == 2
        first = plot_autocorrelations(posterior, num=1).axes[0].lines[0]
        assert first.get_ydata()[0] == pytest.approx(1.0)
        with pytest.raises(UnsupportedError, match="Traces need a chain"):
            plot_traces(fit(SVGD(5), training=BRIEF))


def test_the_grammar_knows_them() -> None:
    assert dubito.parse("sgmcmc(sgld, schedule=cyclical, weights=select.last_layer())") == SGMCMC(
        "sgld", "cyclical", weights=select.last_layer()
    )
    assert dubito.parse("hmc(method=hmc, prior=normal(0, 2))") == HMC("hmc", prior=priors.Normal(0.0, 2.0))
    assert dubito.parse("svgd(30)") == SVGD(30)
