"""How a tuning search looks while it runs: a bar on a terminal, plain lines into anything else."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ds_nvme.options import Candidate
    from ds_nvme.trial import Trial

_LINE_EVERY_S = 5.0


def describe(candidate: Candidate) -> str:
    """Options in a few words."""
    from ds_nvme.sizes import format_size

    text = f"{candidate.engine}, blocks of {format_size(candidate.block_size)}, depth {candidate.queue_depth}, "
    text += f"{candidate.intra_op_parallelism} thread(s)"
    text += ", submitted one by one" if candidate.single_submit else ""
    return text + ("" if candidate.overlap_events else ", a batch at a time")


def rates(trial: Trial) -> str:
    """The rates of a trial in GB/s."""
    import statistics

    pairs = (("read", trial.read), ("write", trial.write))
    return ", ".join(f"{name} = {statistics.median(values) / 1e9:5.2f}" for name, values in pairs if values)


class View(Protocol):
    """Shows a search's progress on standard error. A context manager."""

    def __enter__(self) -> View: ...
    def __exit__(self, *error: object) -> None: ...
    def __call__(self, trial: Trial, best: Trial, part: float) -> None:
        """See `ds_nvme.tune.Progress`."""


def make_view(*, verbose: bool) -> View:
    """A bar where standard error is a terminal that can show one, otherwise lines.

    Args:
        verbose: also a line for each measurement.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return _Bar(console, verbose)
    return _Lines(verbose)


class _Lines:
    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._shown: Trial | None = None
        self._last = -_LINE_EVERY_S

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, trial: Trial, best: Trial, part: float) -> None:
        if self._verbose:
            self._say(f"round {trial.round}: {rates(trial)} GB/s: {describe(trial.candidate)}")
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S and (best is not self._shown or now - self._last >= 2 * _LINE_EVERY_S):
            self._shown, self._last = best, now
            self._say(f"{part:4.0%}  best so far: {rates(best)} GB/s: {describe(best.candidate)}")

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class _Bar:
    def __init__(self, console: object, verbose: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        assert isinstance(console, Console)
        self._verbose = verbose
        # Few refreshes: drawing takes processor time from what is measured.
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            refresh_per_second=2,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("writing the files", total=1.0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, trial: Trial, best: Trial, part: float) -> None:
        if self._verbose:
            line = f"round {trial.round}: {rates(trial)} GB/s: {describe(trial.candidate)}"
            self._progress.console.print(line, markup=False, highlight=False)
        text = f"best so far: {rates(best)} GB/s: {describe(best.candidate)}"
        self._progress.update(self._task, completed=part, description=text)
