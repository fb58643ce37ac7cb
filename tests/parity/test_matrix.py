"""The matrix: every stage, precision, accumulation, clipping, bucket size, overlap and world."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch

from parity import runs
from parity.problem import Outcome, Problem, distance, reference
from testing import RankPool

# Adam's first steps have the size of lr whatever the gradient's, so a near-zero gradient's rounding would be
# all one sees in low precision: a larger eps keeps updates in proportion.
PROBLEMS = {
    "fp32": Problem(),
    "bf16": Problem(arguments={"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.01}),
    "fp16": Problem(arguments={"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.01}),
}
CLIP = 0.05
# Low precision: gradients are rounded to 8 (bf16) or 11 (fp16) bits before they are added up.
TOLERANCE = {"fp32": 1e-6, "bf16": 3e-2, "fp16": 4e-3}
TINY, DEFAULT = 1000, 500_000_000


@cache
def expected(world: int, accumulation: int, clip: float, precision: str) -> Outcome:
    return reference(PROBLEMS[precision], world, accumulation, clip, precision)


def distances(ours: Outcome, theirs: Outcome) -> tuple[float, float, float]:
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses))
    gradients = max(distance(ours.gradients[n], g) for n, g in theirs.gradients.items())
    weights = max(distance(ours.weights[n], w) for n, w in theirs.weights.items())
    return losses, gradients, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_matrix(
    ranks: Callable[[int], RankPool], report: Callable[..., None], world: int, stage: int, precision: str
) -> None:
    keys = list(itertools.product([1, 4], [0.0, CLIP], [TINY, DEFAULT], [False, True]))
    cells = []
    for accumulation, clip, bucket, overlap in keys:
        zero = {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": overlap,
        }
        cells.append((PROBLEMS[precision], precision, accumulation, clip, zero))
    by_rank = ranks(world).run(runs.many, cells)
    worst = (0.0, 0.0, 0.0)
    for index, (accumulation, clip, bucket, overlap) in enumerate(keys):
        ours, theirs = by_rank[0][index], expected(world, accumulation, clip, precision)
        found = distances(ours, theirs)
        worst = tuple(map(max, worst, found))  # type: ignore[assignment]
        cell = f"accumulation {accumulation}, clip {clip}, bucket {bucket}, overlap {overlap}"
        assert max(found) <= TOLERANCE[precision], f"{cell}: losses, gradients, weights differ by {found}"
        assert ours.norm == pytest.approx(theirs.norm, rel=max(1e-6, TOLERANCE[precision] / 4)), cell
        for other in by_rank[1:]:  # every rank holds the same model
            assert all(torch.equal(ours.weights[n], other[index].weights[n]) for n in ours.weights), cell
    report(f"stage {stage}, {precision}", world, len(keys), *worst)
    _independent_of_buckets(keys, by_rank[0])


def _independent_of_buckets(keys: list[tuple[int, float, int, bool]], outcomes: list[Outcome]) -> None:
    """Bit for bit; with clipping the norm's own sum may round otherwise, in the last digit."""
    first: dict[tuple[int, float], Outcome] = {}
    for (accumulation, clip, bucket, overlap), outcome in zip(keys, outcomes):
        other = first.setdefault((accumulation, clip), outcome)
        for name, value in outcome.weights.items():
            where = f"{name}: bucket {bucket}, overlap {overlap}, clip {clip}"
            if clip:
                assert distance(value, other.weights[name]) <= 1e-6, where
            else:
                assert torch.equal(value, other.weights[name]), where


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_ddp(ranks: Callable[[int], RankPool], report: Callable[..., None], world: int, stage: int) -> None:
    worst = (0.0, 0.0, 0.0)
    cells = list(itertools.product([1, 4], [0.0, CLIP]))
    for accumulation, clip in cells:
        ours = ranks(world).run(runs.with_engine, PROBLEMS["fp32"], "fp32", accumulation, clip, {"stage": stage})[0]
        theirs = ranks(world).run(runs.with_ddp, PROBLEMS["fp32"], accumulation, clip)[0]
        found = distances(ours, theirs)
        worst = tuple(map(max, worst, found))  # type: ignore[assignment]
        assert max(found) <= 1e-6, f"accumulation {accumulation}, clip {clip}: {found}"
    report(f"stage {stage}, fp32 against DDP", world, len(cells), *worst)
