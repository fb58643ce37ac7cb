"""Find the fastest options for a drive, by successive halving instead of the whole grid.

All candidates (or as many of them as the time allows, drawn at random) are measured for a moment, the better half
longer, and so on. The few that are left at the end are measured in turn, several times, so that the answer comes with
its spread.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ds_nvme.drives import Drives
from ds_nvme.engines.choose import names, refusal
from ds_nvme.files import Path
from ds_nvme.options import Candidate

_FINALISTS = 3
_FIRST_SHARE, _FINAL_SHARE = 0.4, 0.25  # of the time


@dataclass(frozen=True)
class Space:
    """Which values to combine. The defaults are what may matter on today's drives.

    Args:
        engine: names. Default: all that run here.
        block_size: bytes of a request.
        queue_depth: requests in flight, each thread.
        single_submit: submit one by one.
        overlap_events: refill as requests end.
        intra_op_parallelism: threads.
    """

    engine: Sequence[str] = ()
    block_size: Sequence[int] = (128 << 10, 512 << 10, 1 << 20, 4 << 20)
    queue_depth: Sequence[int] = (4, 16, 32, 128)
    single_submit: Sequence[bool] = (False,)
    overlap_events: Sequence[bool] = (True,)
    intra_op_parallelism: Sequence[int] = (1, 2, 4)

    def candidates(self) -> list[Candidate]:
        """All combinations."""
        engines = self.engine or [name for name in names() if refusal(name) is None]
        return [
            Candidate(*values)
            for values in itertools.product(
                engines,
                self.block_size,
                self.queue_depth,
                self.single_submit,
                self.overlap_events,
                self.intra_op_parallelism,
            )
        ]


@dataclass
class Trial:
    """What was measured of one candidate.

    Args:
        candidate: the options.
        read: bytes a second, one value for each measurement of the latest round.
        write: the same for writing.
        round: how far it came: 0 is the first round.
    """

    candidate: Candidate
    read: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    round: int = 0

    @property
    def score(self) -> float:
        """Bytes a second of writing and reading the same amount, or of the one that was measured."""
        rates = [statistics.median(values) for values in (self.read, self.write) if values]
        return statistics.harmonic_mean(rates) if rates else 0.0

    @property
    def spread(self) -> float:
        """Largest less smallest rate as a part of the median, over loops; of the direction that varies more."""
        spreads = [(max(v) - min(v)) / statistics.median(v) for v in (self.read, self.write) if v]
        return max(spreads, default=math.inf)


@dataclass(frozen=True)
class Tuned:
    """A search's outcome.

    Args:
        best: the fastest.
        trials: everything measured, the best first.
        seconds: how long it took.
    """

    best: Trial
    trials: tuple[Trial, ...]
    seconds: float

    def confidence(self) -> str:
        """How sure it is, in words."""
        text = f"varies by {self.best.spread:.0%} over {max(len(self.best.read), len(self.best.write))} loops"
        rivals = [trial for trial in self.trials[1:] if trial.round == self.best.round]
        near = [trial for trial in rivals if trial.score > self.best.score * (1 - self.best.spread)]
        return f"{text}; {len(near)} of {len(rivals)} other finalists are as good within that"


Measure = Callable[[Candidate, bool, float], float]
"""Candidate, whether to write, seconds to spend: bytes a second."""


def tune(
    folders: Path | Sequence[Path],
    *,
    space: Space | None = None,
    io_size: int = 400 << 20,
    loops: int = 5,
    budget: float = 60.0,
    read: bool = True,
    write: bool = True,
    progress: Callable[[Trial, Trial, float], object] | None = None,
    measure: Measure | None = None,
    seed: int = 0,
) -> Tuned:
    """Search for the fastest options on the drive of a folder, or on those of several at once.

    Nothing stays in the folders, however it ends: the files have no names.

    Args:
        folders: one on each drive.
        space: what to try. Default: `Space()`.
        io_size: bytes of the file on each drive. Default: 400 MiB.
        loops: measurements of each finalist. Default: 5.
        budget: seconds to take. Default: 60.
        read: measure reading.
        write: measure writing.
        progress: called after each measurement with the trial, the best so far, and the part of the time that is over.
        measure: in place of the drives, for tests.
        seed: of the order in which candidates are measured.

    Raises:
        ValueError: neither reading nor writing, or nothing to try.
    """
    if not read and not write:
        raise ValueError("a search measures reading or writing or both: got neither")
    trials = [Trial(candidate) for candidate in (space or Space()).candidates()]
    if not trials:
        raise ValueError("a search has something to try: the space has no combination")
    begin = time.monotonic()
    directions = [flag for flag, wanted in ((True, write), (False, read)) if wanted]
    with ExitStack() as stack:
        drives = measure or stack.enter_context(Drives(folders, io_size)).measure
        order = random.Random(seed)

        def run(trial: Trial, seconds: float) -> None:
            for direction in directions:
                rate = drives(trial.candidate, direction, seconds / len(directions))
                (trial.write if direction else trial.read).append(rate)
            if progress is not None:
                best = max(trials, key=lambda each: (each.round, each.score))
                progress(trial, best, min((time.monotonic() - begin) / budget, 1.0))

        def over(part: float) -> bool:
            return time.monotonic() - begin > part * budget

        # The first round takes most of the time, the halves after it together about as much.
        left: list[Trial] = trials if len(trials) <= _FINALISTS else []
        for trial in order.sample(trials, len(trials)) if not left else ():
            if len(left) >= 2 * _FINALISTS and over(_FIRST_SHARE):
                break  # what is not reached is left out: a sample of the space finds the region
            run(trial, _FIRST_SHARE * budget / len(trials))
            left.append(trial)
        rounds = max(math.ceil(math.log2(len(left) / _FINALISTS)), 0)
        for number in range(1, rounds + 1):
            left = sorted(left, key=lambda trial: -trial.score)[: max(math.ceil(len(left) / 2), _FINALISTS)]
            for trial in left:
                trial.read, trial.write, trial.round = [], [], number
            share = ((1 - _FINAL_SHARE) * budget - (time.monotonic() - begin)) / (rounds - number + 1)
            if number < rounds:
                for trial in order.sample(left, len(left)):
                    run(trial, max(share, 0.0) / len(left))
        share = max(budget - (time.monotonic() - begin), 0.0) / loops
        for trial in left:
            trial.read, trial.write = [], []
        for _ in range(loops):
            for trial in order.sample(left, len(left)):
                run(trial, share / len(left))
    ranked = sorted((trial for trial in trials if trial.score), key=lambda trial: (-trial.round, -trial.score))
    return Tuned(ranked[0], tuple(ranked), time.monotonic() - begin)
