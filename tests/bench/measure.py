"""Measuring: rounds in which every contender runs one burst of steps, and what the rounds say."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from jobs import ForeignLoad, Job, JobError, machine_load

MIN_CLEAN = 3
"""With fewer undisturbed bursts than this a contender is judged by all its bursts, and marked."""


@dataclass(frozen=True)
class Burst:
    """A few steps in a row of one contender, the first left out. Times are of the slowest rank."""

    times_ms: list[float]
    phases_ms: dict[str, float]
    foreign: float

    @property
    def median_ms(self) -> float:
        """The burst's middle step."""
        return median(self.times_ms)


@dataclass
class Record:
    """What one contender did in all rounds. `losses` are means over the ranks, by step."""

    contender: str
    num_parameters: int
    bursts: dict[int, Burst] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    imports_mb: float = 0.0
    peak_mb: float = 0.0
    beyond_imports_mb: float = 0.0


@dataclass(frozen=True)
class Spread:
    """A median with the 10th and 90th percentile around it."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9))


@dataclass(frozen=True)
class Patience:
    """How disturbances by other processes are met: a burst during which they used more than `limit`
    processors is repeated, at most `retries` times, each after waiting at most `wait_s` for quiet."""

    limit: float = 0.1
    retries: int = 2
    wait_s: float = 10.0

    def wait_for_quiet(self) -> None:
        """Sleeps until the machine is idle or the patience ends."""
        deadline = time.monotonic() + self.wait_s
        while machine_load(0.3) > self.limit and time.monotonic() < deadline:
            pass


def run_rounds(
    jobs: Mapping[str, Job],
    num_rounds: int,
    num_steps: int,
    patience: Patience,
    say: Callable[[str], None],
    seed: int = 0,
) -> tuple[dict[str, Record], dict[str, str]]:
    """Round after round, in an order shuffled anew, lets every job run a burst; then asks for memory.

    Returns the records of those that came through and, for those that failed on the way, why.
    """
    records = {name: Record(name, job.num_parameters) for name, job in jobs.items()}
    failures: dict[str, str] = {}

    def run(name: str, number: int) -> None:
        try:
            if number < 0:  # optimizer states and gradients come into being here
                _burst(jobs[name], records[name], 2)
            elif number < num_rounds:
                records[name].bursts[number] = _quiet_burst(jobs[name], records[name], num_steps, patience)
            else:
                _read_memory(jobs[name], records[name])
        except JobError as error:
            failures[name] = str(error)
            del records[name]

    shuffle = random.Random(seed)
    for number in range(-1, num_rounds + 1):
        for name in shuffle.sample(list(records), len(records)):
            run(name, number)
        if 0 <= number < num_rounds:
            say(f"round {number + 1}/{num_rounds}")
    return {name: records[name] for name in jobs if name in records}, failures


def _quiet_burst(job: Job, record: Record, num_steps: int, patience: Patience) -> Burst:
    """The least disturbed of the bursts that the patience allows."""
    bursts: list[Burst] = []
    while len(bursts) <= patience.retries:
        patience.wait_for_quiet()
        bursts.append(_burst(job, record, num_steps))
        if bursts[-1].foreign <= patience.limit:
            break
    return min(bursts, key=lambda burst: burst.foreign)


def _read_memory(job: Job, record: Record) -> None:
    memory = job.ask("memory")
    record.imports_mb = max(rank["imports_mb"] for rank in memory)
    record.peak_mb = max(rank["peak_mb"] for rank in memory)
    record.beyond_imports_mb = max(rank["peak_mb"] - rank["imports_mb"] for rank in memory)


def _burst(job: Job, record: Record, num_steps: int) -> Burst:
    load = ForeignLoad(job.pids)
    ranks = job.ask("steps", n=num_steps + 1)
    foreign = load.share()
    record.losses += [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks))]
    times = [max(step) for step in zip(*(rank["times_ms"] for rank in ranks))][1:]
    phases = [phase for rank in ranks for phase in rank["phases_ms"][1:]]
    return Burst(times, {key: median(phase[key] for phase in phases) for key in phases[0]}, foreign)


def summarize(records: Mapping[str, Record], limit: float) -> list[dict[str, Any]]:
    """A row per contender: times, ratios to the peers, memory, and the loss at the last step all reached."""
    last_step = min(len(record.losses) for record in records.values())
    rows = []
    for name, record in records.items():
        clean = _clean(record, limit)
        bursts = [record.bursts[number] for number in clean]
        steps = Spread.of([step for burst in bursts for step in burst.times_ms])
        phases = {key: median(burst.phases_ms[key] for burst in bursts) for key in bursts[0].phases_ms}
        rows.append(
            {
                "contender": name,
                "step_ms": asdict(steps),
                "phases_ms": phases,
                "num_bursts": len(bursts),
                "num_disturbed": sum(burst.foreign > limit for burst in record.bursts.values()),
                "judged_by_disturbed": any(burst.foreign > limit for burst in bursts),
                "to_ddp": _ratio(record, records.get("ddp"), limit),
                "to_deepspeed": _ratio(record, records.get(same_stage_deepspeed(name)), limit),
                "imports_mb": record.imports_mb,
                "peak_mb": record.peak_mb,
                "beyond_imports_mb": record.beyond_imports_mb,
                "num_parameters": record.num_parameters,
                "loss": record.losses[last_step - 1],
                "loss_step": last_step,
            }
        )
    return rows


def same_stage_deepspeed(contender: str) -> str:
    """The DeepSpeed contender of the same ZeRO stage, or a name nobody has."""
    family, _, stage = contender.partition(":")[0].partition("-")
    return f"deepspeed-{stage}" if family in ("ours", "deepspeed") else "-"


def _clean(record: Record, limit: float) -> list[int]:
    clean = [number for number, burst in record.bursts.items() if burst.foreign <= limit]
    return clean if len(clean) >= MIN_CLEAN else list(record.bursts)


def _ratio(record: Record, other: Record | None, limit: float) -> dict[str, float] | None:
    """Of the medians of bursts of the same round, so that drift of the machine cancels."""
    if other is None or other is record:
        return None
    both = set(_clean(record, limit)) & set(_clean(other, limit)) or set(record.bursts)
    return asdict(Spread.of([record.bursts[i].median_ms / other.bursts[i].median_ms for i in sorted(both)]))


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
