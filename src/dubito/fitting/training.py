"""`Training`: epochs, optimizer, learning rate, early stopping and checkpoints, for all recipes that train."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch

from dubito.core.constraints import AtMost, Count, CountOrZero, FilePath, NonNegative, OrWord, Range, Share
from dubito.core.precision import casting
from dubito.core.settings import Setting, setting
from dubito.fitting.loggers import Log

AUTO: Any = "auto"
# Settings that may be "auto", which `dubito.fitting.automatic` replaces by a number before the fit begins.
AutoEpochs = Annotated[int, Range(0), AtMost(10**8), OrWord(AUTO)]
AutoSize = Annotated[int, Range(1), AtMost(2**62), OrWord(AUTO)]
AutoRate = Annotated[float, Range(0, above=True), OrWord(AUTO)]


@setting
class Training(Setting):
    """Settings of the fit loop.

    Args:
        epochs: The number of passes over the data; 0 keeps the model as it is. ``"auto"`` trains as long as held-out
            examples profit: see `dubito.fitting.automatic`.
        lr: The peak learning rate; ``"auto"`` is 0.003 for networks of up to 100,000 weights and 0.001 for larger ones.
        batch_size: The batch size, for data that is not batched yet; ``"auto"`` is a sixteenth of the examples, at
            least 16 and at most 128.
        optimizer: ``"adam"`` (fused), ``"adamw"`` or ``"sgd"`` (Nesterov momentum).
        momentum: The momentum of ``"sgd"``.
        weight_decay: An L2 penalty ``weight_decay/2 · ‖w‖²`` added to the mean loss (decoupled for ``"adamw"``).
        schedule: The decay of the learning rate: ``"constant"``, ``"cosine"`` or ``"linear"`` to zero, ``"hold"``
            (constant for one half of the steps, then linear to zero), ``"step"`` (to a tenth after one half of the
            steps, to a hundredth after three quarters). ``"auto"`` is ``"hold"`` if the number of epochs was found on
            held-out examples, else ``"cosine"``.
        warmup: The fraction of all steps over which the learning rate rises linearly from zero.
        clip: The largest allowed norm of the gradient, or None.
        early_stopping: Stop after this many epochs without a better validation score, and return to the best epoch; or
            None.
        restore_best: Return to the epoch with the best validation score at the end.
        evidence_every: For `MAP`: every so many epochs, choose the prior precision of every parameter, and the noise
            unless it is a number, by the Laplace evidence at the current weights; or None (Immer et al. 2021,
            https://arxiv.org/abs/2104.04975).
        evidence_burn_in: The number of epochs before the first of these choices.
        shuffle: Whether to shuffle data that is not batched yet.
        checkpoint: A file to which the run is saved at intervals. If the run is stopped, the same call continues from
            this file and gives the same result.
        checkpoint_every: The seconds between two checkpoints.
        precision: ``"bf16"`` or ``"fp16"`` runs the network in training steps under `torch.autocast`; weights, losses
            and optimizer stay as they are. There is no loss scaling, so ``"fp16"`` needs well-scaled gradients.
        accumulate: Compute the gradient of a batch in this many parts, for less memory. The result is the same but for
            batch normalization, whose statistics are those of a part.
        compile: Run the network by `torch.compile`, or by that of a named backend. Only for recipes that train the
            network itself, such as `MAP`.
        log: A callable that is given the numbers of each step and epoch as a dict; `dubito.loggers` has ready ones.
    """

    setting_name = "Training"
    described = "a Training(...)"
    epochs: AutoEpochs = AUTO
    lr: AutoRate = AUTO
    batch_size: AutoSize = AUTO
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: Share = 0.9
    weight_decay: NonNegative = 0.0
    schedule: Literal["auto", "constant", "cosine", "linear", "hold", "step"] = "auto"
    warmup: Share = 0.0
    clip: Annotated[float, Range(0, above=True, infinite=True)] | None = None
    early_stopping: Count | None = None
    restore_best: bool = False
    evidence_every: Count | None = None
    evidence_burn_in: CountOrZero = 0
    shuffle: bool = True
    checkpoint: FilePath | None = None
    checkpoint_every: Annotated[float, Range(0, infinite=True)] = 60.0
    precision: Literal["bf16", "fp16"] | None = None
    accumulate: Count = 1
    compile: bool | str = False
    log: Any = None

    def __post_init__(self) -> None:
        if self.log is not None:
            object.__setattr__(self, "log", Log(self.log))
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", os.fspath(self.checkpoint))

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction `progress` of all steps.

        >>> Training(lr=1.0, schedule="linear").rate(0.25)
        0.75
        """
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        rest = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        factor = {
            "constant": 1.0,
            "auto": 0.5 * (1 + math.cos(math.pi * rest)),
            "cosine": 0.5 * (1 + math.cos(math.pi * rest)),
            "linear": 1 - rest,
            "hold": min(2 * (1 - rest), 1.0),
            "step": 1.0 if rest < 0.5 else 0.1 if rest < 0.75 else 0.01,
        }[self.schedule]
        return self.lr * factor

    def identity(self) -> Training:
        """Return the settings that determine the result: all but those of checkpoints and logs."""
        return self.replace(checkpoint=None, checkpoint_every=0.0, log=None)

    def casts(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Return the context of a training step, in which networks run in the precision."""
        if self.precision is None:
            return nullcontext()
        return casting(
            ("cpu" if device is None else device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)
        )

    @property
    def is_automatic(self) -> bool:
        """Whether a setting is still ``"auto"``."""
        return AUTO in (self.epochs, self.lr, self.batch_size)

    @property
    def needs_validation(self) -> bool:
        """Whether the loop must compute the validation score after each epoch."""
        return self.early_stopping is not None or self.restore_best
