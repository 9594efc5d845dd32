"""The schedule of a chain: the step size of each step, and which steps are kept as samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The step size decays as t^-0.55, the slowest decay that Welling & Teh (2011) allow.
POWER = 0.55
# The length of a cycle over that of its sampled last part: the first 80 % explore without noise.
CYCLE = 5


@dataclass(frozen=True)
class Schedule:
    r"""The factor of the step size at each step, and the steps that are kept as samples.

    ``"constant"``: the factor is 1. ``"decay"``: after burn-in it is $(1 + t/b)^{-0.55}$ with b the burn-in (or a tenth
    of all steps, if longer). ``"cyclical"`` (Zhang et al. 2020, https://arxiv.org/abs/1902.03932): after burn-in it
    falls from 1 to 0 in each cycle, as half a cosine; the first 80 % of a cycle explore without noise, the last 20 %
    are sampled.

    Args:
        kind: One of the above.
        burn_in: The number of first steps, which are never kept.
        thinning: The number of steps between two samples.
        num_samples: The number of samples.
        cycles: The number of cycles that the samples are divided among.

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
        """The number of samples in one cycle; the last may have fewer."""
        return math.ceil(self.num_samples / self.cycles) if self.kind == "cyclical" else self.num_samples

    @property
    def cycle_length(self) -> int:
        """The number of steps in one cycle."""
        sampled = self.per_cycle * self.thinning
        return CYCLE * sampled if self.kind == "cyclical" else sampled

    @property
    def total(self) -> int:
        """All steps."""
        if self.kind != "cyclical":
            return self.burn_in + self.num_samples * self.thinning
        return self.burn_in + math.ceil(self.num_samples / self.per_cycle) * self.cycle_length

    def count(self, step: int) -> int:
        """Return the number of samples after `step` steps."""
        if step <= self.burn_in:
            return 0
        cycle, within = divmod(step - self.burn_in, self.cycle_length)
        sampled = max(within - (self.cycle_length - self.per_cycle * self.thinning), 0) // self.thinning
        return min(cycle * self.per_cycle + sampled, self.num_samples)

    def factor(self, step: int) -> float:
        """Return the factor of the step size of the step after `step` others."""
        after = step - self.burn_in
        if after < 0 or self.kind == "constant":
            return 1.0
        if self.kind == "decay":
            return (1 + after / max(self.burn_in, self.total / 10)) ** -POWER
        # never 0, so that the last steps of a cycle still move
        return 0.5 * (math.cos(math.pi * (after % self.cycle_length) / self.cycle_length) + 1)

    def is_noisy(self, step: int) -> bool:
        """Return whether noise is injected in the step after `step` others."""
        after = step - self.burn_in
        if self.kind != "cyclical":
            return True
        return after >= 0 and after % self.cycle_length >= self.cycle_length - self.per_cycle * self.thinning

    def sample_at(self, step: int) -> int | None:
        """Return the index of the sample that is kept after `step` steps, or None."""
        after = step - self.burn_in
        if after <= 0:
            return None
        cycle, within = divmod(after - 1, self.cycle_length)
        sampled = within + 1 - (self.cycle_length - self.per_cycle * self.thinning)
        index = cycle * self.per_cycle + sampled // self.thinning - 1
        good = sampled > 0 and sampled % self.thinning == 0 and index < self.num_samples
        return index if good else None
