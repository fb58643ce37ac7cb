"""Corners of states: an optimizer with a past, schedules, fp16 overflow, and what an engine leaves behind.

Where the original was silently wrong: a client optimizer's states dropped at wrapping or thawing, schedules
stepped once too often, masters updated by a step that was to be skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch

from parity.corner_states import (
    NUM_RATES,
    OPTIMIZERS,
    SCHEDULES,
    Overflow,
    Resume,
    Trace,
    at_the_smallest_scale,
    cycles,
    overflowing,
    rates,
    resumed,
)
from parity.problem import distance
from testing import RankPool


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen at first"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_with_a_past(
    ranks: Callable[[int], RankPool], report: Callable[..., None], optimizer: str, frozen: bool, world: int
) -> None:
    """Moments and step counts go over to the pieces, those of a parameter that is frozen then included."""
    jobs = [Resume(optimizer, stage, frozen) for stage in ((0, 1, 2, 3) if world < 4 else (2, 3))]
    jobs.append(Resume(optimizer, 2, frozen, made_by="callable"))
    worst = 0.0
    for found in ranks(world).run(resumed, jobs):
        for job, (ours, theirs) in zip(jobs, found):
            far = {n: distance(ours[n], w) for n, w in theirs.items()}
            blame = max(far, key=far.__getitem__)
            assert far[blame] <= 1e-6, f"{job}: weights differ by {far[blame]}, most in {blame}"
            worst = max(worst, far[blame])
    report(f"{optimizer} with a past{', frozen' * frozen}", world, len(jobs), None, None, worst)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates(ranks: Callable[[int], RankPool], name: str) -> None:
    """The optimizer sees the schedule's rates, one a step, wherever the schedule was made."""
    for where in ("configuration", "client", "callable", "outside"):
        for ours, theirs in ranks(2).run(rates, name, where):
            assert len(ours) == NUM_RATES, where
            assert list(chain(*ours)) == pytest.approx(list(chain(*theirs)), rel=1e-12), where
            assert len({tuple(each) for each in ours}) > 1, "the schedule does something"


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a.keys() & b.keys())


@pytest.mark.parametrize("world", [1, 2])
def test_overflow(ranks: Callable[[int], RankPool], world: int) -> None:
    """One rank's inf leaves the step out on every rank; the scale halves as hysteresis says; then all is as if
    the step had not been."""
    dynamic = {"initial_scale_power": 8, "hysteresis": 2}
    jobs = [
        Overflow(steps, fp16, stage)
        for stage in (0, 2)
        for steps, fp16 in [
            ((), {"loss_scale": 256.0}),
            ((0, 2, 3), {"loss_scale": 256.0}),
            ((0, 2, 3), dynamic),
            ((1, 2), {**dynamic, "hysteresis": 1}),
            ((1, 3), {**dynamic, "consecutive_hysteresis": True}),
        ]
    ]
    scales = [
        [256.0] * 6,
        [256.0] * 6,
        [256.0, 256.0, 128.0, 64.0, 64.0, 64.0],
        [256.0, 128.0, 64.0, 64.0, 64.0, 64.0],
        [256.0] * 6,
    ] * 2
    for traces in ranks(world).run(overflowing, jobs):
        for index, (job, trace) in enumerate(zip(jobs, traces)):
            assert trace.scales == scales[index], job
            assert trace.applied == [step not in job.steps for step in range(6)], job
            _hold_to_undisturbed(trace, traces[index // 5 * 5], job)


@pytest.mark.parametrize("stage", [0, 2])
def test_overflow_at_the_smallest_scale(ranks: Callable[[int], RankPool], stage: int) -> None:
    """The scale falls to min_loss_scale and no further; another overflow there is an error on every rank."""
    for scales, message in ranks(2).run(at_the_smallest_scale, stage):
        assert scales == [16.0, 8.0]
        assert "not finite at the smallest loss scale (8)" in message


def _hold_to_undisturbed(trace: Trace, undisturbed: Trace, job: Overflow) -> None:
    good = 0
    for step, values in enumerate(trace.values):
        good += step not in job.steps
        if step in job.steps and step:
            assert _same(values, trace.values[step - 1]), f"{job}: step {step} left something"
        if good:
            expected = undisturbed.values[good - 1]
            assert values.keys() == expected.keys()
            # Powers of two: another scale changes no digit but of the smallest numbers.
            far = max(distance(values[n], v) for n, v in expected.items())
            assert far <= (0.0 if job.fp16.get("loss_scale") else 1e-3), f"{job}: step {step} differs by {far}"


@pytest.mark.parametrize(("stage", "same_model"), [(0, True), (2, False)], ids=["one model", "new models"])
def test_cycles_leave_nothing(ranks: Callable[[int], RankPool], stage: int, same_model: bool) -> None:
    """initialize, train, destroy: memory, file descriptors, threads, process groups and tensors stay flat."""
    for found in ranks(2).run(cycles, 9, stage, same_model):
        first, last = found[2], found[-1]
        assert last.fds <= first.fds, found
        assert last.threads <= first.threads, found
        assert last.groups == first.groups, found
        assert last.tensors <= first.tensors, found
        # A model's states are 4.5 MB; six of them would be 27.
        assert last.rss_bytes - first.rss_bytes < 8 << 20, found
