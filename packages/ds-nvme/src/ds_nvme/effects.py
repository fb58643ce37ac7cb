"""What options do to the rate, told apart from what the drive did meanwhile.

A rate is taken as a product of what its candidate is worth, of how fast the drive was at the time, and of chance.
Drives slow down while they are measured (a cache that fills, heat, neighbours on the same machine) by more than what
good options differ by, so rates of different moments can't be compared as they are. Both factors are found by taking
turns: the drive's pace is a running mean of what the candidates don't explain, a candidate's worth is the mean of what
the pace doesn't. A candidate that was measured shortly also leans on those that share its options, whose separate
effects are estimated from all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ds_nvme.options import Candidate

_PACE_REACH = 6.0  # measurements after which the running mean has forgotten most
_CHANCE_S = 0.15  # a measurement of so many seconds is worth half of a very long one
_LEAN = 0.15  # a candidate with so much worth of measurements leans half on its relatives
_TURNS = 8


@dataclass(frozen=True)
class Measured:
    """One measurement in one direction.

    Args:
        candidate: the options.
        rate: bytes a second.
        seconds: how long it took.
    """

    candidate: Candidate
    rate: float
    seconds: float


def typical_rates(measured: Sequence[Measured]) -> dict[Candidate, float]:
    """Bytes a second of each candidate, as if all had met the drive at its average pace.

    Args:
        measured: of one direction, in the order in which they were taken.
    """
    logs = [math.log(max(each.rate, 1.0)) for each in measured]
    weights = [each.seconds / (each.seconds + _CHANCE_S) for each in measured]
    taken: dict[Candidate, list[int]] = {}
    for index, each in enumerate(measured):
        taken.setdefault(each.candidate, []).append(index)
    weight = {candidate: sum(weights[i] for i in indices) for candidate, indices in taken.items()}
    relatives = _Relatives(_mean(logs, weights), weight)
    worth = dict.fromkeys(taken, relatives.level)
    for _ in range(_TURNS):
        pace = _pace([log - worth[each.candidate] for log, each in zip(logs, measured)], weights)
        paced = [log - slow for log, slow in zip(logs, pace)]
        own = {c: sum(weights[i] * paced[i] for i in indices) / weight[c] for c, indices in taken.items()}
        relatives.learn(own)
        for candidate, value in own.items():
            expected = relatives.expect(candidate)
            worth[candidate] = expected + weight[candidate] / (weight[candidate] + _LEAN) * (value - expected)
    return {candidate: math.exp(value) for candidate, value in worth.items()}


class _Relatives:
    """The effect of each value of each option, as if they did not depend on each other: a first guess."""

    def __init__(self, level: float, weight: dict[Candidate, float]) -> None:
        self.level = level
        self._votes = {candidate: each / (each + _LEAN) for candidate, each in weight.items()}
        self._values = {candidate: astuple(candidate) for candidate in weight}
        self._effects: list[dict[object, float]] = [{} for _ in next(iter(self._values.values()))]

    def learn(self, own: dict[Candidate, float]) -> None:
        """Adjust one option's effects after the other."""
        for option, effects in enumerate(self._effects):
            sums: dict[object, list[float]] = {}
            for candidate, value in own.items():
                level = self._values[candidate][option]
                vote = self._votes[candidate]
                entry = sums.setdefault(level, [0.0, 0.0])
                entry[0] += vote * (value - self.expect(candidate) + effects.get(level, 0.0))
                entry[1] += vote
            effects.update({level: total / votes for level, (total, votes) in sums.items()})

    def expect(self, candidate: Candidate) -> float:
        """The logarithm of the rate that its options promise."""
        return self.level + sum(e.get(v, 0.0) for e, v in zip(self._effects, self._values[candidate]))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights)) / sum(weights)


def _pace(residuals: Sequence[float], weights: Sequence[float]) -> list[float]:
    """A running mean that forgets exponentially, backwards and forwards in time; 0 on the whole."""
    keep = math.exp(-1 / _PACE_REACH)
    sums, parts = [0.0] * len(residuals), [0.0] * len(residuals)
    for step in (1, -1):
        total = part = 0.0
        for i in range(len(residuals))[::step]:
            total = total * keep + weights[i] * residuals[i]
            part = part * keep + weights[i]
            sums[i] += total
            parts[i] += part
    # Each counts itself from both sides, once too often.
    sums = [total - weight * own for total, weight, own in zip(sums, weights, residuals)]
    parts = [part - weight for part, weight in zip(parts, weights)]
    pace = [total / part for total, part in zip(sums, parts)]
    level = _mean(pace, weights)
    return [each - level for each in pace]
