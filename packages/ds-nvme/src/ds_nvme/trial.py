"""What a search knows of one candidate, and what it answers in the end."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from ds_nvme.options import Candidate


@dataclass
class Trial:
    """What was measured of one candidate.

    Args:
        candidate: the options.
        read: bytes a second, one value for each measurement of the latest round.
        write: the same for writing.
        round: how far it came: 0 is the first round.
        typical_read: bytes a second as estimated from all rounds, as if all candidates had met the drive at the same
            pace; 0 until it is estimated.
        typical_write: the same for writing.
    """

    candidate: Candidate
    read: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    round: int = 0
    typical_read: float = 0.0
    typical_write: float = 0.0

    @property
    def score(self) -> float:
        """Bytes a second of writing and reading the same amount, or of the one that was measured; 0 before that."""
        typical = [rate for rate in (self.typical_read, self.typical_write) if rate]
        rates = typical or [statistics.median(values) for values in (self.read, self.write) if values]
        return statistics.harmonic_mean(rates) if rates else 0.0

    @property
    def spread(self) -> float:
        """Largest less smallest rate as a part of the median, over loops; of the direction that varies more."""
        spreads = [(max(v) - min(v)) / statistics.median(v) for v in (self.read, self.write) if v]
        return max(spreads, default=math.inf)

    @property
    def loops(self) -> int:
        """Measurements of the latest round, each way."""
        return max(len(self.read), len(self.write))


@dataclass(frozen=True)
class Tuned:
    """A search's outcome.

    Args:
        best: the fastest.
        trials: everything measured, the best first.
        seconds: how long it took.
        complete: it came to its end; otherwise it was stopped, and `best` is the best until then.
    """

    best: Trial
    trials: tuple[Trial, ...]
    seconds: float
    complete: bool = True

    @property
    def rivals(self) -> tuple[Trial, ...]:
        """The others that came as far as the best."""
        return tuple(trial for trial in self.trials[1:] if trial.round == self.best.round)

    @property
    def near(self) -> tuple[Trial, ...]:
        """Rivals that chance does not tell from the best: within its spread."""
        return tuple(trial for trial in self.rivals if trial.score > self.best.score * (1 - self.best.spread))

    def confidence(self) -> str:
        """How sure it is, in words."""
        if not self.complete:
            return f"stopped early: the best of {len(self.trials)} so far, after {self.best.loops} loop(s)"
        text = f"varies by {self.best.spread:.0%} over {self.best.loops} loops"
        return f"{text}; {len(self.near)} of {len(self.rivals)} other finalists are as good within that"
