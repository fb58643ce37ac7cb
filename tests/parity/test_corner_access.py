"""Corners of the documented access to sharded states: full and local forms, read and written in mid-training.

Where the original was silently wrong: a written value that the master overwrites, a gradient read before the
boundary that is another rank's or unscaled, a loaded state that the masters don't follow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parity.corner_access import CHANGES, Access, changed, gradient_of_unused, partial_gradients, reloaded
from parity.problem import distance
from testing import RankPool


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_change(ranks: Callable[[int], RankPool], report: Callable[..., None], change: str, world: int) -> None:
    """What is written takes part in the next step, as if plain PyTorch's tensors had been written."""
    jobs = [Access(change, stage) for stage in ((0, 1, 2, 3) if world < 4 else (2, 3))] + [Access(change, 2, "bf16")]
    worst = 0.0
    for found in ranks(world).run(changed, jobs):
        for job, (ours, theirs) in zip(jobs, found):
            far = {n: distance(ours[n], w) for n, w in theirs.items()}
            blame = max(far, key=far.__getitem__)
            tolerance = 1e-6 if job.precision == "fp32" else 3e-2
            assert far[blame] <= tolerance, f"{job}: weights differ by {far[blame]}, most in {blame}"
            if job.precision == "fp32":
                worst = max(worst, far[blame])
    report(f"{change} changed", world, len(jobs), None, None, worst)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_in_mid_accumulation(ranks: Callable[[int], RankPool], stage: int, world: int) -> None:
    """At any micro-batch the full gradient is the sum so far over all ranks; pieces add up to it when reduced."""
    for found in ranks(world).run(partial_gradients, stage):
        for index, (ours, theirs, pieces) in enumerate(found):
            assert ours.keys() == theirs.keys()
            far = {n: distance(ours[n], g) for n, g in theirs.items()}
            assert max(far.values()) <= 1e-6, f"micro-batch {index}: {far}"
            if stage == 2 or index == len(found) - 1:
                squares = {n: float(g.square().sum()) for n, g in theirs.items()}
                assert {n: float(p) for n, p in pieces.items()} == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_set_for_an_unused_parameter(ranks: Callable[[int], RankPool], stage: int, beside: bool) -> None:
    """A gradient that is set is a gradient, though backward gave none: the step takes it."""
    for found, expected in ranks(2).run(gradient_of_unused, stage, beside):
        assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize("stage", [0, 2])
def test_masters_are_what_was_loaded(ranks: Callable[[int], RankPool], stage: int) -> None:
    """To the digit: what a master had beyond bf16 is of the weights that are gone."""
    for masters, loaded in ranks(2).run(reloaded, stage):
        assert all(torch.equal(masters[name], value) for name, value in loaded.items())
