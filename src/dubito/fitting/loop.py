"""The fit loop of all methods: progress bar, checkpoints, exact resume, early stopping, NaN guard."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.core import distributed, io, params, precision
from dubito.core.batches import Batch
from dubito.core.constraints import Natural
from dubito.core.constraints import check as check_argument
from dubito.core.errors import FileFormatError, NonFiniteError
from dubito.core.randomness import Stream, derive_seed, draw_seed
from dubito.fitting import run_identity
from dubito.fitting.checks import Template, check_batch, explaining_shapes
from dubito.fitting.inference import Inference, LossWatch, NonFinite, Problem, State
from dubito.fitting.interrupts import Interrupts, Terminated
from dubito.fitting.posterior import Posterior
from dubito.fitting.problems import build, checked, finish, make_problem, resolve
from dubito.fitting.progress import batch_bar
from dubito.fitting.recipe import FitCall, Recipe
from dubito.fitting.run_identity import LoaderDigest


@distributed.together()
@torch.inference_mode(False)
@torch.enable_grad()  # even if the caller has disabled gradients
@precision.in_networks_only()
def fit(recipe: Recipe, call: FitCall) -> Posterior:
    """Fit `recipe`; see `Recipe.fit`."""
    problem = make_problem(recipe, call)
    generator, weight = problem.generator, next(problem.model.parameters())
    distributed.share_generator(generator, weight.device)
    if distributed.is_active():
        distributed.check_same(
            run_identity.settings_digest(recipe, problem), "recipes, training settings or likelihoods"
        )
    problem, template = checked(problem)
    start, seed = generator.get_state(), draw_seed(generator)
    try:
        with explaining_shapes(problem.source, problem.validation):
            with Stream(derive_seed(seed, "build"), weight.device, libraries=True).active():
                found, own = resolve(recipe, problem, call.data, start, seed)
                problem = replace(problem, training=found.training, likelihood=found.likelihood)
                inference = build(recipe, problem)
            given, problem = problem.source, replace(problem, source=inference.source or problem.source)
            posterior = _Loop(inference, problem, template, own, seed).run()
        return finish(posterior, given, problem.validation, found, recipe.trains)
    except KeyboardInterrupt:
        generator.set_state(start)  # so that the same call continues from the checkpoint
        raise


@dataclass
class Best:
    """The best validation score so far, with its epoch and state."""

    score: float = -float("inf")
    epoch: int = -1
    state: State | None = None


@dataclass
class _Loop:
    inference: Inference
    problem: Problem
    template: Template
    identity: dict[str, str]  # digests of this run for its checkpoints; empty without checkpoints
    seed: int  # with the position in the run, it determines all random numbers of the user's code
    state: State = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0  # the number of completed batches of this epoch
    done: bool = False
    best: Best = field(default_factory=Best)
    start: State = field(default_factory=dict)  # the state at the start of this epoch
    good: State | None = None  # the last such state from which a step succeeded
    loader_states: list[Tensor] = field(default_factory=list)  # of the loader's generators at the start of the epoch
    whole: Batch | None = None  # all the data, for methods with batches="full"
    first_states: list[Tensor] = field(default_factory=list)  # of these generators at the start of the first epoch
    loader_digest: LoaderDigest = field(default_factory=LoaderDigest)  # of the first pass
    last_write: float = 0.0
    resumed_from: str | None = None  # the checkpoint from which the run continued
    suspected: str | None = None  # the same, until the first update from it has succeeded
    losses: LossWatch = field(default_factory=LossWatch)  # of an accelerator
    watched: int = 3  # how many more updates are watched for draws of the network from numpy or `random`

    @cached_property
    def interrupts(self) -> Interrupts:
        return Interrupts(catch_sigterm=self.problem.training.checkpoint is not None)

    @property
    def on_cpu(self) -> bool:  # where numbers are read at no cost
        return self.problem.source.device in (None, torch.device("cpu"))

    def run(self) -> Posterior:
        problem, inference = self.problem, self.inference
        with self._stream("init").active():
            weights, buffers = params.of(problem.model), params.buffers_of(problem.model)
            self.state = inference.init(weights, buffers, problem.generator)
        self.first_states = problem.source.generator_states()
        self._resume()
        self._remember_start()
        self.last_write = time.monotonic()
        per_epoch = 1 if inference.batches == "full" else problem.source.num_batches
        bar = batch_bar(per_epoch, inference.epochs, (self.epoch, self.batch), problem.progress)
        with self.interrupts, closing(bar):
            self._drive(bar)
        if self.best.state is not None:
            self.state = self.best.state
        if not self.done:
            self.done = True
            self._write()
        return self._posterior(self.state)

    def _posterior(self, state: State) -> Posterior:
        """Return the posterior of a state, which may draw random numbers."""
        with self._stream("posterior").active(), io.explaining_content(self.resumed_from):
            return self.inference.posterior(state)

    def _drive(self, bar: Any) -> None:
        """Run all epochs; write a checkpoint if the run is interrupted."""
        while not (self.done or self.epoch >= self.inference.epochs or self._out_of_patience()):
            try:
                self._one_epoch(bar)
            except KeyboardInterrupt as stop:
                if not distributed.is_active():  # the other processes may not be interrupted
                    self._write_last(stop)
                if not isinstance(stop, Terminated):
                    raise
                self.interrupts.deliver()
                self.problem.source.set_generator_states(self.loader_states)  # not ended: this epoch is continued

    def _one_epoch(self, bar: Any) -> None:
        for batch in self._batches():
            self._one_update(batch, bar)
        reads = self.losses.waiting == 0 or self.losses.waiting >= LossWatch.few  # on the CPU, nothing waits
        if reads or self.epoch + 1 >= self.inference.epochs or self.problem.validation is not None:
            self._check_losses()
            self._validate()
            if (self.on_cpu or not self.inference.checks_itself) and not io.is_finite(self.state):
                raise self._non_finite("The weights became NaN or infinite")
        elif self.good is None:
            self.good = self.start  # the weights of the beginning, until later ones are known to be finite
        with self.interrupts.held():
            self.epoch, self.batch = self.epoch + 1, 0
            self._remember_start()
        self._write_if_due()

    def _one_update(self, batch: Batch, bar: Any) -> None:
        if self.epoch == 0 and self.problem.source.in_memory is None:
            check_batch(self.problem.model, self.problem.likelihood, batch, self.template)
        stream, training = self._stream("update", self.epoch, self.batch, distributed.rank()), self.problem.training
        explaining = nullcontext() if self.suspected is None else io.explaining_content(self.suspected)
        try:
            with self.interrupts.held(), stream.active():
                with explaining, training.casts(self.problem.source.device):
                    self.state, info = self.inference.update(self.state, batch, self.problem.generator)
                if self.on_cpu:
                    self.good = self.start
                else:
                    self.losses.note(info.get("loss"), (self.epoch, self.batch))
                self.batch += 1
        except NonFinite as error:
            raise self._non_finite(str(error)) from error
        self.suspected = None
        if self.losses.is_due:
            self._check_losses()
        if self.watched > 0:
            self.watched = -1 if stream.has_used_libraries() else self.watched - 1
        self._show(bar, info)
        self._write_if_due()

    def _show(self, bar: Any, info: Mapping[str, Any]) -> None:
        """Give the numbers of a step to the progress bar and to the user's logger."""
        if self.problem.training.log is not None:
            self._log({"batch": self.batch - 1, **info})
        if not bar.disable:
            bar.update(1)
            if self.batch % (10 if self.on_cpu else LossWatch.every) == 1:
                bar.set_postfix({key: f"{float(value):.4g}" for key, value in info.items()}, refresh=False)

    def _log(self, numbers: Mapping[str, Any]) -> None:
        """Give the numbers of a step or an epoch to the user's logger."""
        log = self.problem.training.log
        if log is not None and distributed.rank() == 0:
            log({"epoch": self.epoch, **{name: float(value) for name, value in numbers.items()}})

    @cached_property
    def _is_logged(self) -> bool:
        """Whether the first process has a logger; all of them must know it, as they score together."""
        return distributed.from_first(self.problem.training.log is not None, self.problem.source.device)

    def _batches(self) -> Iterator[Batch]:
        source = self.problem.source
        if self.inference.batches == "mini":
            return source.epoch(self._loader_stream(self.epoch), skip=self.batch, seen=self._digester(self.epoch == 0))
        if self.whole is None:
            self.whole = source.full(self._loader_stream(0), seen=self._digester(True))
        return iter([self.whole][self.batch :])

    def _loader_stream(self, epoch: int) -> Stream:
        """Return the random stream of the user's loader in one pass."""
        place = ("loader", epoch) if self.inference.batches == "mini" else ("loader",)
        return self.problem.source.stream(derive_seed(self.seed, *place))

    def _digester(self, is_first: bool) -> Callable[[Any], None] | None:
        """Return the function that digests the first pass over a loader, to recognize its data by the checkpoint."""
        if not is_first or not self.identity or self.problem.source.in_memory is not None:
            return None
        self.loader_digest = LoaderDigest()
        return self.loader_digest.add

    def _stream(self, *place: int | str) -> Stream:
        """Return the random stream that the user's code draws from at one place in the run."""
        has_libraries = self.watched != 0 or place[0] != "update"  # they are slow to exchange
        return Stream(derive_seed(self.seed, *place), self.problem.source.device, libraries=has_libraries)

    def _remember_start(self) -> None:
        """Store the generator states of the loader and the inference state at the start of an epoch."""
        if self.whole is None:
            self.loader_states = self.problem.source.generator_states()
        if self.inference.anytime:
            self.start = io.clone(self.state)

    # ------------------------------------------------------------------ validation

    def _validate(self) -> None:
        source, score = self.problem.validation, self.inference.score
        needed = self.problem.training.needs_validation
        if score is None or source is None or not (needed or self._is_logged):
            return
        total = torch.zeros(2, dtype=torch.float64, device=source.device)
        for batch in source.replay():
            if batch.num_rows:
                with self._stream("validation", self.epoch).active():
                    log_prob = score(self.state, batch).double()
                total += torch.stack([log_prob.sum(), log_prob.new_tensor(len(log_prob))])
        distributed.sum_([total])
        mean = float(total[0] / total[1])
        self._log({"validation": mean})
        if needed and mean > self.best.score:
            self.best = Best(mean, self.epoch, io.clone(self.state))

    def _out_of_patience(self) -> bool:
        patience = self.problem.training.early_stopping
        return patience is not None and self.best.epoch >= 0 and self.epoch - 1 - self.best.epoch >= patience

    # ------------------------------------------------------------------ faults

    def _check_losses(self) -> None:
        """Read what an accelerator noted about the losses since the last time."""
        if self.losses.waiting:
            bad = self.losses.read()
            if bad is not None:
                self.epoch, self.batch = bad
                raise self._non_finite("The loss became NaN or infinite")
            self.good = self.start

    def _non_finite(self, what: str) -> NonFiniteError:
        where = f"{what} in epoch {self.epoch + 1}, batch {self.batch + 1}"
        if not self.inference.anytime:
            return NonFiniteError(f"{where}: check that batch for extreme inputs, and the network for extreme weights.")
        posterior = self._posterior(io.clone(self.start if self.good is None else self.good))
        return NonFiniteError(
            f"{where}: lower the learning rate (now {self.problem.training.lr:g}), clip gradients with "
            "Training(clip=1.0), or check that batch for extreme inputs; the last good posterior is in this error's "
            "`.posterior`.",
            posterior,
        )

    # ------------------------------------------------------------------ checkpoints

    def _write_if_due(self) -> None:
        training = self.problem.training
        if training.checkpoint is not None:
            due = distributed.rank() == 0 and time.monotonic() - self.last_write >= training.checkpoint_every
            asked = [float(due), float(self.interrupts.is_terminated)]
            device = self.problem.source.device if distributed.is_active() else None  # else it would be read each step
            flags = torch.tensor(asked, device=device)
            distributed.sum_([flags])
            if bool(flags.any()):
                self._write()
            if bool(flags[1]):  # one of the processes received SIGTERM: all of them stop here
                self.interrupts.deliver()

    def _write_last(self, stop: KeyboardInterrupt) -> None:
        """Write the checkpoint of an interrupted run, and add a note to the error about what is on disk."""
        path = self.problem.training.checkpoint
        if path is None:
            return
        try:
            self._write()
        except KeyboardInterrupt as again:  # a second Ctrl-C: do not wait for the checkpoint
            again.add_note(run_identity.on_disk(path))
            raise
        stop.add_note(run_identity.on_disk(path))

    def _write(self) -> None:
        """Write a checkpoint; if that fails, warn and continue, and try again when the next one is due."""
        path, best = self.problem.training.checkpoint, self.best
        if path is None:
            return
        self._check_losses()
        self.last_write = time.monotonic()
        state = self.state
        if self.inference.additive and distributed.is_active():
            state = io.clone(state)
            distributed.sum_(list(io.tensors(state)))
        if distributed.rank() == 0:
            tree = {
                "identity": self.identity, "witness": asdict(self.loader_digest), "first_states": self.first_states,
                "seed": self.seed, "done": self.done, "epoch": self.epoch, "batch": self.batch,
                "loader_states": self.loader_states,
                "generator": self.problem.generator.get_state(),
                "best": {"score": best.score, "epoch": best.epoch, "state": best.state},
                "state": state,
            }  # fmt: skip
            try:
                io.save(path, "checkpoint", tree)
            except FileFormatError as error:
                text = f"{error} The run continues without this checkpoint and tries again when the next one is due."
                warnings.warn(text, stacklevel=2)

    def _resume(self) -> None:
        path = self.problem.training.checkpoint
        if path is None or not distributed.from_first(Path(path).is_file(), self.problem.source.device):
            return
        saved = io.load(path, "checkpoint")
        self._check_identity(path, saved)
        with io.reading(path):
            own = {"done": self.done, "epoch": self.epoch, "batch": self.batch}
            self.done, self.epoch, self.batch = io.copy_into(own, {key: saved[key] for key in own}).values()
            check_argument("epoch", Natural, self.epoch)
            check_argument("batch", Natural, self.batch)
            self.problem.source.set_generator_states(saved["loader_states"])
            self.problem.generator.set_state(saved["generator"])
            best = saved["best"]
            found = None if best["state"] is None else io.copy_into(io.clone(self.state), best["state"])
            self.best = Best(float(best["score"]), int(best["epoch"]), found)
            if not self.inference.additive or distributed.rank() == 0:  # an additive state is a sum over all processes
                self.state = self.inference.restore(self.state, saved["state"])
        self.resumed_from = self.suspected = path

    def _check_identity(self, path: str, saved: dict[str, Any]) -> None:
        """Raise an error if the checkpoint belongs to another run; of several processes, the first one decides."""
        source = self.problem.source
        with io.reading(path):
            why = run_identity.refuse_another(path, saved.get("identity"), self.identity)
            if why is None:
                self.seed, self.loader_digest, self.first_states = run_identity.saved_start(saved, source)
        is_first = why is None and distributed.rank() == 0
        if is_first and not self.loader_digest.agrees(source, self._loader_stream(0), self.first_states):
            why = run_identity.refusal(path, "other batches from the loader")
        if not distributed.from_first(why is None, source.device):
            raise FileFormatError(why or run_identity.refusal(path, "see the error of the first process"))
