"""Find the fastest options for a drive, by successive halving instead of the whole grid.

All candidates (or as many of them as the time allows, drawn at random) are measured for a moment, the better half
longer, and so on. The few that are left at the end are measured in turn, several times, so that the answer comes with
its spread. Who is better is judged from all measurements so far, freed of the drive's own ups and downs: see `effects`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

from ds_nvme.drives import Drives
from ds_nvme.effects import Measured, typical_rates
from ds_nvme.errors import StoppedError
from ds_nvme.files import Path
from ds_nvme.options import Candidate
from ds_nvme.places import HOST, Place
from ds_nvme.space import Space
from ds_nvme.trial import Trial, Tuned

__all__ = ["Measure", "Progress", "Search", "Space", "Trial", "Tuned", "tune"]

_FINALISTS = 4
_FIRST_SHARE, _FINAL_SHARE = 0.35, 0.3  # of the time
_LONGEST_S = 3.0  # a longer measurement says no more: drives change their pace faster

Measure = Callable[[Candidate, bool, float], float]
"""Candidate, whether to write, seconds to spend: bytes a second."""

Progress = Callable[[Trial, Trial, float], object]
"""The trial just measured, the best so far, the part of the time that is over (0 to 1)."""


class Search:
    """Successive halving over candidates. `run()` once.

    Args:
        measure: how fast a candidate is.
        candidates: what to try; one or more.
        loops: measurements of each finalist. Default: 5.
        budget: seconds to take at most, about. Default: 60.
        read: measure reading.
        write: measure writing.
        progress: called after each measurement.
        stop: asked between measurements whether to end with what is known.
        clock: seconds, for tests.
        begin: what the clock showed when the budget began. Default: now.
        seed: of the order in which candidates are measured.

    Raises:
        ValueError: neither reading nor writing, nothing to try, or no time or loops to do it.
    """

    def __init__(
        self,
        measure: Measure,
        candidates: Sequence[Candidate],
        *,
        loops: int = 5,
        budget: float = 60.0,
        read: bool = True,
        write: bool = True,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        begin: float | None = None,
        seed: int = 0,
    ) -> None:
        if not read and not write:
            raise ValueError("a search measures reading or writing or both: got neither")
        if not candidates:
            raise ValueError("a search has something to try: the space has no combination")
        if loops < 1 or not 0 < budget < math.inf:
            raise ValueError(f"a search has 1 loop or more and some seconds: got {loops} loops, {budget} seconds")
        self._measure = measure
        self._trials = [Trial(candidate) for candidate in candidates]
        self._loops, self._budget = loops, budget
        self._directions = [flag for flag, wanted in ((True, write), (False, read)) if wanted]
        self._progress, self._stop = progress, stop
        self._clock = clock
        self._begin = clock() if begin is None else begin
        self._order = random.Random(seed)
        self._measured: dict[bool, list[Measured]] = {flag: [] for flag in self._directions}
        self._overrun = 1.0  # how many times longer measurements take than they are asked to

    def run(self) -> Tuned:
        """Search until the time is over, or `stop` says so.

        Raises:
            StoppedError: it was stopped before anything was measured.
        """
        complete = True
        try:
            self._halve()
        except StoppedError:
            complete = False
        self._judge()
        ranked = sorted((t for t in self._trials if t.score), key=lambda trial: (-trial.round, -trial.score))
        if not ranked:
            raise StoppedError("a search measures something before it is stopped: this one had not")
        return Tuned(ranked[0], tuple(ranked), self._elapsed(), complete)

    def _halve(self) -> None:
        left: list[Trial] = self._trials if len(self._trials) <= _FINALISTS else []
        if not left:
            order = self._order.sample(self._trials, len(self._trials))
            end = _FIRST_SHARE * self._budget
            for index, trial in enumerate(order):
                if len(left) >= 2 * _FINALISTS and self._elapsed() > end:
                    break  # what is not reached is left out: a sample of the space finds the region
                self._try(trial, (end - self._elapsed()) / (len(order) - index))
                left.append(trial)
        # The first round takes most of the time, the halves after it together about as much.
        rounds = max(math.ceil(math.log2(len(left) / _FINALISTS)), 0)
        for number in range(1, rounds + 1):
            self._judge()
            left = sorted(left, key=lambda trial: -trial.score)[: max(math.ceil(len(left) / 2), _FINALISTS)]
            for trial in left:
                trial.round = number
            if number < rounds:
                end = self._elapsed() + ((1 - _FINAL_SHARE) * self._budget - self._elapsed()) / (rounds - number)
                self._pass(left, end)
        for loop in range(self._loops):
            end = self._elapsed() + (self._budget - self._elapsed()) / (self._loops - loop)
            self._pass(left, end, fresh=loop == 0)
            self._judge()

    def _pass(self, trials: Sequence[Trial], end: float, *, fresh: bool = True) -> None:
        """Measure each once, in random order, until about `end` seconds after the beginning."""
        for index, trial in enumerate(self._order.sample(trials, len(trials))):
            self._try(trial, (end - self._elapsed()) / (len(trials) - index), fresh=fresh)

    def _try(self, trial: Trial, seconds: float, *, fresh: bool = False) -> None:
        """Measure one in about so many seconds; a fresh round's values take the place of the one before."""
        taken: list[tuple[bool, Measured]] = []
        for direction in self._directions:
            begin = self._clock()
            asked = min(max(seconds, 0.0) / len(self._directions) / self._overrun, _LONGEST_S)
            rate = self._measure(trial.candidate, direction, asked)
            if self._stop is not None and self._stop():
                raise StoppedError("a search goes on to its end: it was stopped")  # and what was cut short is no rate
            took = max(self._clock() - begin, 1e-3)
            if asked > 0:
                self._overrun += 0.1 * (min(max(took / asked, 1.0), 4.0) - self._overrun)
            taken.append((direction, Measured(trial.candidate, rate, took)))
        if fresh:
            trial.read, trial.write = [], []
        for direction, measured in taken:
            self._measured[direction].append(measured)
            (trial.write if direction else trial.read).append(measured.rate)
        if self._progress is not None:
            best = max(self._trials, key=lambda each: (each.round, each.score))
            self._progress(trial, best, min(self._elapsed() / self._budget, 1.0))

    def _judge(self) -> None:
        """Estimate all rates anew."""
        for direction, measured in self._measured.items():
            rates = typical_rates(measured) if measured else {}
            for trial in self._trials:
                rate = rates.get(trial.candidate, 0.0)
                if direction:
                    trial.typical_write = rate
                else:
                    trial.typical_read = rate

    def _elapsed(self) -> float:
        return self._clock() - self._begin


def tune(
    folders: Path | Sequence[Path],
    *,
    space: Space | None = None,
    io_size: int = 400 << 20,
    loops: int = 5,
    budget: float = 60.0,
    read: bool = True,
    write: bool = True,
    place: Place = HOST,
    flush: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    seed: int = 0,
) -> Tuned:
    """Search for the fastest options on the drive of a folder, or on those of several at once.

    Nothing stays in the folders, however it ends: the files have no names.

    Args:
        folders: one on each drive.
        space: what to try. Default: `Space()`.
        io_size: bytes of the file on each drive. Default: 400 MiB.
        loops: measurements of each finalist. Default: 5.
        budget: seconds to take at most, about. Default: 60.
        read: measure reading.
        write: measure writing.
        place: where the moved memory is. Default: host memory.
        flush: drop the page cache before each measured read, the system's too where this process may.
        progress: called after each measurement.
        stop: asked many times a second whether to end with what is known.
        seed: of the order in which candidates are measured.

    Raises:
        ValueError: neither reading nor writing, nothing to try, or no time or loops to do it.
        StoppedError: it was stopped before anything was measured.
        NvmeError: the drive or the place can't be used.
    """
    begin = time.monotonic()
    candidates = place.candidates(space or Space())
    drives = Drives(folders, io_size, place=place, flush=flush, stop=stop)
    search = Search(
        drives.measure,
        candidates,
        loops=loops,
        budget=budget,
        read=read,
        write=write,
        progress=progress,
        stop=stop,
        begin=begin,
        seed=seed,
    )
    with drives:
        return search.run()
