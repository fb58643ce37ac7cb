"""Every schedule against its closed form and against DeepSpeed's numbers, and momentum."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.lr_schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)
from testing.optimizers import lrs_of, momenta_of
from testing.optimizers import scheduled as optimizer

GOLDEN = json.loads((Path(__file__).parent / "data" / "lr_schedules.json").read_text())["cases"]


def trace(schedule: Schedule, num_steps: int) -> list[float]:
    """The learning rate that each of the first updates runs with."""
    seen = []
    for _ in range(num_steps):
        seen.append(lrs_of(schedule.optimizer)[0])
        schedule.step()
    return seen


# Against DeepSpeed's numbers


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['schedule']}-{GOLDEN.index(case)}")
def test_deepspeed_s_numbers(case: dict[str, Any]) -> None:
    target = optimizer(*case["group_lrs"])
    schedule = build_scheduler(case["schedule"], target, case["params"])
    for iteration, lrs, momenta in case["rows"]:
        if iteration >= 0:
            schedule.step(iteration)
        assert lrs_of(target) == pytest.approx(lrs, rel=1e-10, abs=1e-14)
        assert momenta_of(target) == pytest.approx(momenta, rel=1e-10)


def test_the_recorded_cases_cover_every_schedule() -> None:
    assert {case["schedule"] for case in GOLDEN} == set(SCHEDULES)


# Against closed forms


@given(
    low=st.floats(0, 1),
    size=st.integers(1, 50),
    rate=st.floats(0, 10),
    iteration=st.integers(-1, 500),
)
def test_range_test_formula(low: float, size: int, rate: float, iteration: int) -> None:
    line = LRRangeTest(optimizer(), low, size, rate)
    stairs = LRRangeTest(optimizer(), low, size, rate, lr_range_test_staircase=True)
    assert line.lr_at(iteration) == pytest.approx([low + low * rate * (iteration + 1) / size])
    assert stairs.lr_at(iteration) == pytest.approx([low + low * rate * math.floor((iteration + 1) / size)])


@given(
    first=st.integers(1, 40),
    second=st.integers(1, 40),
    decay=st.integers(1, 20),
    rate=st.floats(0, 3),
    iteration=st.integers(-1, 200),
)
def test_one_cycle_formula(first: int, second: int, decay: int, rate: float, iteration: int) -> None:
    schedule = OneCycle(
        optimizer(),
        0.1,
        0.7,
        rate,
        first,
        second,
        decay_step_size=decay,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
    )
    points = [0, first, first + second]
    done = iteration + 1
    if done <= first + second:
        if done <= first:
            height = (done - points[0]) / (points[1] - points[0])
        else:
            height = 1 - (done - points[1]) / (points[2] - points[1])
        assert schedule.lr_at(iteration) == pytest.approx([0.1 + 0.6 * height])
        assert schedule.momentum_at(iteration) == pytest.approx([0.9 - 0.1 * height if done else 0.8])
    else:
        assert schedule.lr_at(iteration) == pytest.approx([0.1 / (1 + rate * (done - points[2]) / decay)])
        assert schedule.momentum_at(iteration) == pytest.approx([0.9])


@given(size=st.integers(1, 60), stairs=st.integers(1, 20))
def test_one_cycle_stairs_take_at_most_so_many_heights_and_reach_the_top(size: int, stairs: int) -> None:
    schedule = OneCycle(optimizer(), 0.0, 1.0, cycle_first_step_size=size, cycle_first_stair_count=stairs)
    rising = [schedule.lr_at(iteration)[0] for iteration in range(-1, size)]
    falling = [schedule.lr_at(iteration)[0] for iteration in range(size - 1, 2 * size)]
    assert rising == sorted(rising)
    assert (rising[0], rising[-1]) == (0.0, 1.0)
    assert falling == rising[::-1]
    assert len(set(rising)) <= stairs + 1
    assert all(value * stairs == pytest.approx(round(value * stairs)) for value in rising)


def test_one_cycle_without_a_second_half_drops_at_the_top() -> None:
    schedule = OneCycle(optimizer(), 0.1, 0.5, cycle_first_step_size=4, cycle_second_step_size=0)
    assert trace(schedule, 7) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1])


def warmup(iteration: int, steps: int, kind: str) -> float:
    if iteration < 0:
        return 0.0
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1, steps) if kind == "log" else iteration / steps


@given(steps=st.integers(2, 60), kind=st.sampled_from(["log", "linear"]), iteration=st.integers(-1, 200))
def test_warmup_formula(steps: int, kind: str, iteration: int) -> None:
    schedule = WarmupLR(optimizer(), 0.2, 0.5, steps, kind)
    assert schedule.lr_at(iteration) == pytest.approx([0.2 + 0.3 * warmup(iteration, steps, kind)])


@given(
    steps=st.integers(2, 60),
    more=st.integers(1, 60),
    kind=st.sampled_from(["log", "linear"]),
    iteration=st.integers(-1, 200),
)
def test_decay_formulas(steps: int, more: int, kind: str, iteration: int) -> None:
    line = WarmupDecayLR(optimizer(), steps + more, 0.2, 0.5, steps, kind)
    cosine = WarmupCosineLR(optimizer(0.5), steps + more, 0.4, steps, 0.1, kind)
    if iteration < steps:
        progress = warmup(iteration, steps, kind)
        assert line.lr_at(iteration) == pytest.approx([0.2 + 0.3 * progress])
        assert cosine.lr_at(iteration) == pytest.approx([0.5 * (0.4 + 0.6 * progress)])
    else:
        left = max(0.0, 1 - (iteration - steps) / more)
        angle = math.pi * min(1.0, (iteration + 1 - steps) / more)
        assert line.lr_at(iteration) == pytest.approx([0.2 + 0.3 * left])
        assert cosine.lr_at(iteration) == pytest.approx([0.5 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(angle)))])


# Where ours is not DeepSpeed's


def test_no_warmup_steps_mean_no_warmup() -> None:
    assert trace(WarmupLR(optimizer(), 0.0, 0.5, 0), 3) == [0.5, 0.5, 0.5]
    decay = WarmupDecayLR(optimizer(), 4, 0.0, 0.4, 0)
    assert trace(decay, 6) == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.1, 0.0])
    cosine = trace(WarmupCosineLR(optimizer(0.5), 4, warmup_num_steps=0, cos_min_ratio=0.0), 6)
    assert cosine[0] == 0.5
    assert cosine[2] == pytest.approx(0.25)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[4:] == [0.0, 0.0]


def test_cosine_starts_at_the_documented_ratio() -> None:
    target = optimizer(0.5)
    WarmupCosineLR(target, 10, warmup_min_ratio=0.4, warmup_num_steps=5)
    assert lrs_of(target) == pytest.approx([0.2])


def test_cosine_takes_a_ratio_for_each_group() -> None:
    target = optimizer(0.5, 1.0)
    schedule = WarmupCosineLR(target, 10, [0.4, 0.1], 5, [0.2, 0.3], "linear")
    assert lrs_of(target) == pytest.approx([0.2, 0.1])
    schedule.step(100)
    assert lrs_of(target) == pytest.approx([0.1, 0.3])
    assert schedule.get_lr_ratio() == pytest.approx([0.2, 0.3])


def test_warmup_to_the_optimizers_own_learning_rates() -> None:
    target = optimizer(0.5, 0.25)
    schedule = WarmupLR(target, warmup_max_lr=None, warmup_num_steps=4)
    assert lrs_of(target) == [0.0, 0.0]
    schedule.step(4)
    assert lrs_of(target) == [0.5, 0.25]


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_training_shorter_than_its_warmup_is_warned_about(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_scheduler(name, optimizer(), {"total_num_steps": 3, "warmup_num_steps": 5})
    assert "total_num_steps (3) is below warmup_num_steps (5)" in caplog.text


def test_momentum_decay_stays_between_0_and_1() -> None:
    settings = {"cycle_first_step_size": 2, "decay_step_size": 1}
    rising = OneCycle(optimizer(), 0.1, 0.5, **settings, decay_mom_rate=0.5)
    falling = OneCycle(optimizer(), 0.1, 0.5, **settings, decay_mom_rate=-0.5)
    assert rising.momentum_at(10_000) == [0.999]
    assert falling.momentum_at(10_000) == [0.0]
    assert OneCycle(optimizer(), 0.1, 0.5, **settings, decay_mom_rate=0.5, cycle_max_mom=0.9999).momentum_at(
        10_000
    ) == [0.9999]


# Momentum


def test_momentum_of_sgd_is_cycled() -> None:
    target = optimizer(kind="SGD")
    schedule = OneCycle(target, 0.1, 0.5, cycle_first_step_size=2)
    assert momenta_of(target) == [0.8]
    seen = []
    for _ in range(5):
        schedule.step()
        seen += momenta_of(target)
    assert seen == pytest.approx([0.85, 0.8, 0.85, 0.9, 0.9])
    assert schedule.get_mom() == pytest.approx([0.9])


def test_only_the_first_beta_is_cycled() -> None:
    target = optimizer(0.1, 0.1)
    OneCycle(target, 0.1, 0.5, cycle_first_step_size=2, cycle_min_mom=[0.7, 0.6]).step()
    assert [group["betas"] for group in target.param_groups] == [
        (pytest.approx(0.8), 0.99),
        (pytest.approx(0.75), 0.99),
    ]


def test_a_cycle_through_momentum_0_comes_back() -> None:
    target = optimizer(kind="SGD")
    schedule = OneCycle(target, 0.1, 0.5, cycle_first_step_size=2, cycle_min_mom=0.0)
    assert momenta_of(target) == [0.0]
    schedule.step()
    assert momenta_of(target) == [0.45]


@pytest.mark.parametrize("kind", ["plain SGD", "Adadelta"])
def test_an_optimizer_without_momentum_gets_a_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    params = [torch.nn.Parameter(torch.zeros(1))]
    target = torch.optim.SGD(params) if kind == "plain SGD" else torch.optim.Adadelta(params)
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(target, 0.1, 0.5, cycle_first_step_size=2)
    assert "has no momentum" in caplog.text
    schedule.step()
    assert schedule.get_mom() is None
    assert target.param_groups[0].get("momentum", 0) == 0
    assert schedule.get_last_lr() == pytest.approx([0.3])


def test_cycle_momentum_false_leaves_momentum_alone() -> None:
    target = optimizer()
    OneCycle(target, 0.1, 0.5, cycle_first_step_size=2, cycle_momentum=False).step()
    assert momenta_of(target) == [0.88]
