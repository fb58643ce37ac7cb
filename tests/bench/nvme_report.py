"""What nvme.py prints: rates and processor time of all, ours beside each peer, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from measure import Spread
from nvme_contenders import Cost

GIB = 1 << 30
TARGETS = {1 << 20: 0.97, 128 << 10: 0.90}
"""Least rate as a multiple of fio's, by block size."""
MOST_PROCESSOR = 1.2
"""Most processor time as a multiple of fio's."""
MOST_FIRST_S = 0.2


def rate_ratio(ours: list[Cost], theirs: list[Cost]) -> Spread:
    """How many times the peer's rate ours is, within rounds."""
    return Spread.of([peer.wall / mine.wall for mine, peer in zip(ours, theirs)])


def processor_ratio(ours: list[Cost], theirs: list[Cost]) -> Spread:
    """How many times the peer's processor time ours is, within rounds."""
    return Spread.of([mine.processor / max(peer.processor, 1e-6) for mine, peer in zip(ours, theirs)])


def best(costs: Mapping[str, list[Cost]], kind: str) -> str | None:
    """The contender of a kind that is fastest in the median, or None where there is none."""
    names = [name for name in costs if name.startswith(f"{kind}-")]
    return min(names, key=lambda name: median(cost.wall for cost in costs[name]), default=None)


def print_costs(costs: Mapping[str, list[Cost]], title: str, nbytes: int) -> None:
    """A row a contender: its rate, its processor time, and its rate as a multiple of each of ours."""
    ours = [name for name in costs if name.startswith("ours-")]
    heads = "".join(f"{name + ' is':>26}" for name in ours)
    print(f"\n{title:<18}{'MiB/s':>8}{'s CPU/GiB':>11}{heads}")
    for name, values in costs.items():
        rate = median(nbytes / (1 << 20) / cost.wall for cost in values)
        processor = median(cost.processor * GIB / nbytes for cost in values)
        ratios = "".join(f"{show(rate_ratio(costs[mine], values)) + 'x':>26}" if mine != name else f"{'-':>26}"
                         for mine in ours)  # fmt: skip
        print(f"{name:<18}{rate:>8.0f}{processor:>11.3f}{ratios}")


def print_verdicts(costs: Mapping[int, Mapping[str, Mapping[str, list[Cost]]]]) -> None:
    """The targets of ours, one line each, for the engines that fio has too."""
    print("\ntargets (ratio of ours to the peer's, 10th to 90th percentile)")
    for block, orders in costs.items():
        for order, values in orders.items():
            place = f"{order} {block >> 10} KiB"
            for engine in ("libaio", "io_uring"):
                mine = values.get(f"ours-{engine}")
                if mine is None:
                    continue
                peers = {f"fio-{engine}": TARGETS.get(block, 0.9)}
                if (name := best(values, "fio")) is not None:
                    peers[name] = TARGETS.get(block, 0.9)
                if (name := best(values, "deepspeed")) is not None and block == 1 << 20:
                    peers[name] = 1.0
                for peer, least in peers.items():
                    if peer in values:
                        _line(f"{place} rate: ours-{engine} to {peer}", rate_ratio(mine, values[peer]), least=least)
                if f"fio-{engine}" in values:
                    spread = processor_ratio(mine, values[f"fio-{engine}"])
                    _line(f"{place} processor: ours-{engine} to fio-{engine}", spread, most=MOST_PROCESSOR)


def print_first_bytes(seconds: Mapping[str, Spread]) -> None:
    """The time from import to the first bytes moved, of each."""
    for kind, spread in seconds.items():
        _line(f"import to first byte, {kind}, seconds", spread, most=MOST_FIRST_S if kind == "ours" else None)


def show(spread: Spread) -> str:
    """Median and percentiles."""
    return f"{spread.median:.2f} ({spread.p10:.2f}-{spread.p90:.2f})"


def _line(what: str, spread: Spread, *, least: float | None = None, most: float | None = None) -> None:
    verdict = ""
    if least is not None:
        verdict = f"at least {least}: {'met' if spread.median >= least else 'MISSED'}"
    elif most is not None:
        verdict = f"at most {most}: {'met' if spread.median <= most else 'MISSED'}"
    print(f"  {what:<60}{show(spread):>20}  {verdict}")
