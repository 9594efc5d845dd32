"""When a chain moves how far, and when it is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Steps fall off as t^-0.55, the slow end of what Welling & Teh (2011) allow.
POWER = 0.55
# A cycle is so many times as long as its last part, which is sampled: the first 80 % explore without noise.
CYCLE = 5


@dataclass(frozen=True)
class Schedule:
    r"""The factor of the step size, and which steps are kept.

    ``"constant"``: the factor is 1. ``"decay"``: after burn-in it is $(1 + t/b)^{-0.55}$ with b the burn-in (or a tenth
    of all steps, if longer). ``"cyclical"`` (Zhang et al. 2020, https://arxiv.org/abs/1902.03932): after burn-in come
    cycles in which it falls from 1 to 0 as half a cosine; the first 80 % of a cycle explore without noise, the rest is
    sampled.

    Args:
        kind: One of the above.
        burn_in: Steps that are never kept.
        thinning: Steps from one that is kept to the next.
        num_samples: How many are kept.
        cycles: How many cycles they are shared out to.

    >>> schedule = Schedule("constant", burn_in=4, thinning=2, num_samples=3, cycles=1)
    >>> schedule.total, [schedule.sample_at(step) for step in range(1, 11)]
    (10, [None, None, None, None, None, 0, None, 1, None, 2])
    """

    kind: str
    burn_in: int
    thinning: int
    num_samples: int
    cycles: int

    @property
    def per_cycle(self) -> int:
        """Samples in one cycle; the last may have fewer."""
        return math.ceil(self.num_samples / self.cycles) if self.kind == "cyclical" else self.num_samples

    @property
    def cycle_length(self) -> int:
        """Steps in one cycle."""
        sampled = self.per_cycle * self.thinning
        return CYCLE * sampled if self.kind == "cyclical" else sampled

    @property
    def total(self) -> int:
        """All steps."""
        if self.kind != "cyclical":
            return self.burn_in + self.num_samples * self.thinning
        return self.burn_in + math.ceil(self.num_samples / self.per_cycle) * self.cycle_length

    def count(self, step: int) -> int:
        """How many samples are kept after `step` steps."""
        if step <= self.burn_in:
            return 0
        cycle, within = divmod(step - self.burn_in, self.cycle_length)
        sampled = max(within - (self.cycle_length - self.per_cycle * self.thinning), 0) // self.thinning
        return min(cycle * self.per_cycle + sampled, self.num_samples)

    def factor(self, step: int) -> float:
        """The factor of the step size of the step that follows `step` others."""
        after = step - self.burn_in
        if after < 0 or self.kind == "constant":
            return 1.0
        if self.kind == "decay":
            return (1 + after / max(self.burn_in, self.total / 10)) ** -POWER
        # never 0: the last steps of a cycle would stand still
        return 0.5 * (math.cos(math.pi * (after % self.cycle_length) / self.cycle_length) + 1)

    def is_noisy(self, step: int) -> bool:
        """Whether noise is injected in the step that follows `step` others."""
        after = step - self.burn_in
        if self.kind != "cyclical":
            return True
        return after >= 0 and after % self.cycle_length >= self.cycle_length - self.per_cycle * self.thinning

    def sample_at(self, step: int) -> int | None:
        """The number of the sample that is kept after `step` steps, or None."""
        after = step - self.burn_in
        if after <= 0:
            return None
        cycle, within = divmod(after - 1, self.cycle_length)
        sampled = within + 1 - (self.cycle_length - self.per_cycle * self.thinning)
        index = cycle * self.per_cycle + sampled // self.thinning - 1
        good = sampled > 0 and sampled % self.thinning == 0 and index < self.num_samples
        return index if good else None
