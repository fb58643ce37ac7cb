"""Corners of models and losses, each against plain PyTorch: where other engines were silently wrong.

Reports of the original that these hold down: parameters unused on some ranks hang or lose gradients; frozen
ones decay; tied ones count twice; reentrant checkpointing reduces twice; sparse gradients are dropped; small
models on many ranks break partitioning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parity import corners, runs
from parity.problem import Outcome, Problem, distance, reference
from parity.test_matrix import DEFAULT, TINY, distances
from testing import RankError, RankPool

Cell = tuple[int, int, int, bool, bool]  # stage, accumulation, bucket, overlap, loss.backward()
CELLS: dict[int, list[Cell]] = {
    1: [(0, 4, TINY, True, False), (1, 1, DEFAULT, False, True), (2, 4, TINY, False, True), (3, 4, TINY, True, False)],
    2: [
        *((stage, 4, TINY, True, False) for stage in (0, 1, 2, 3)),
        *((stage, 4, TINY, True, True) for stage in (0, 1, 2, 3)),
        *((stage, 1, DEFAULT, False, stage == 1) for stage in (0, 1, 2, 3)),
    ],
    4: [(0, 1, TINY, True, True), (1, 4, DEFAULT, True, False), (2, 4, TINY, True, True), (3, 4, TINY, True, False)],
}


BY_RANK = {"unused", "unused, momentum", "another order"}
"""Ranks run other modules, which stage 3 refuses: all ranks gather a module's parameters together."""


def zero_of(cell: Cell) -> dict[str, Any]:
    stage, _, bucket, overlap, _ = cell
    return {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": overlap}


@cache
def expected(name: str, world: int, accumulation: int) -> Outcome:
    return reference(corners.PROBLEMS[name], world, accumulation, 0.0, "fp32")


def hold(ours: Outcome, theirs: Outcome, tolerance: float, where: str) -> tuple[float, float, float]:
    """Asserts that losses, gradients, weights and norm agree; None agrees with None only."""
    theirs = replace(
        theirs,
        gradients={n: g for n, g in theirs.gradients.items() if g is None or g.numel()},
        weights={n: w for n, w in theirs.weights.items() if w.numel()},
    )
    found = distances(ours, theirs)
    worst = {n: distance(ours.weights[n], w) for n, w in theirs.weights.items()}
    blame = max(worst, key=worst.__getitem__)
    assert max(found) <= tolerance, f"{where}: losses, gradients, weights differ by {found}, most in {blame}"
    assert ours.norm == pytest.approx(theirs.norm, rel=max(1e-6, tolerance)), where
    return found


def hold_cells(
    pool: RankPool, problem: Problem, cells: list[Cell], expect: Callable[[int], Outcome], tolerance: float = 1e-6
) -> tuple[float, float, float]:
    jobs = [(problem, "fp32", cell[1], 0.0, zero_of(cell), None, cell[4]) for cell in cells]
    by_rank = pool.run(runs.many, jobs)
    worst = (0.0, 0.0, 0.0)
    for index, cell in enumerate(cells):
        where = "stage {}, accumulation {}, bucket {}, overlap {}, plain {}".format(*cell)
        found = hold(by_rank[0][index], expect(cell[1]), tolerance, where)
        worst = tuple(map(max, worst, found))  # type: ignore[assignment]
        for other in by_rank[1:]:
            same = (torch.equal(w, other[index].weights[n]) for n, w in by_rank[0][index].weights.items())
            assert all(same), f"{where}: ranks hold different models"
    return worst


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", corners.PROBLEMS)
def test_corner(ranks: Callable[[int], RankPool], report: Callable[..., None], name: str, world: int) -> None:
    """Stages, buckets, overlap and both forms of backward leave plain PyTorch's gradients and weights."""
    cells = [cell for cell in CELLS[world] if cell[0] < 3 or world == 1 or name not in BY_RANK]
    worst = hold_cells(ranks(world), corners.PROBLEMS[name], cells, lambda n: expected(name, world, n))
    report(name, world, len(cells), *worst)


@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
def test_reentrant_segments_differ_by_rank(
    ranks: Callable[[int], RankPool], report: Callable[..., None], plain: bool
) -> None:
    """A reentrant segment is a backward of its own; ranks that run another number of them must not lose step."""
    cells = [(stage, 4, TINY, True, plain) for stage in (0, 1, 2, 3)]
    problem = corners.SKIPPED_REENTRANT
    worst = hold_cells(ranks(2), problem, cells, lambda n: reference(problem, 2, n, 0.0, "fp32"))
    report(f"reentrant, skipped, {'plain' if plain else 'engine'}", 2, len(cells), *worst)


@pytest.mark.parametrize("name", sorted(BY_RANK))
def test_other_modules_by_rank_are_refused_where_they_are_sharded(ranks: Callable[[int], RankPool], name: str) -> None:
    """Every rank ends within seconds; who was about to gather says which module and parameter."""
    with pytest.raises(RankError) as caught:
        hold_cells(ranks(2), corners.PROBLEMS[name], [(3, 4, TINY, True, False)], lambda n: expected(name, 2, n))
    assert caught.value.types.keys() == {0, 1}
    assert "ZeroError" in (kinds := set(caught.value.types.values())) and kinds <= {"ZeroError", "CommError"}
    assert "all ranks run the same modules in the same order" in str(caught.value)
    for rank, kind in caught.value.types.items():
        assert kind == "CommError" or f"on rank {rank}, when" in str(caught.value)


@pytest.mark.parametrize("name", sorted(BY_RANK))
def test_other_modules_by_rank_in_one_unit(ranks: Callable[[int], RankPool], name: str) -> None:
    """What is gathered as a whole may be used differently."""
    problem = replace(corners.PROBLEMS[name], model=corners.WholeBranches)
    hold_cells(ranks(2), problem, [(3, 4, TINY, True, False), (3, 4, TINY, True, True)], lambda n: expected(name, 2, n))
