"""Every schedule through its life cycle: states, jumps, groups that come later; building by name, and errors."""

from __future__ import annotations

import json
import math
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

SMALL: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.5,
        "cycle_first_step_size": 4,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
    },
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_min_ratio": 0.2},
}
"""A short schedule of every kind."""


# Life cycle


@pytest.mark.parametrize("name", SCHEDULES)
def test_state_round_trip_continues_the_run(name: str) -> None:
    whole_run, first_half, second_half = optimizer(0.3, 0.6), optimizer(0.3, 0.6), optimizer(0.3, 0.6)
    run = build_scheduler(name, whole_run, SMALL[name])
    part = build_scheduler(name, first_half, SMALL[name])
    for _ in range(7):
        run.step()
        part.step()
    state = json.loads(json.dumps(part.state_dict()))
    assert state == {"last_batch_iteration": 6}
    resumed = build_scheduler(name, second_half, SMALL[name])
    resumed.load_state_dict(state)
    for _ in range(8):
        assert lrs_of(second_half) == lrs_of(whole_run)
        assert momenta_of(second_half) == momenta_of(whole_run)
        assert resumed.get_last_lr() == lrs_of(whole_run)
        run.step()
        resumed.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_built_on_a_loaded_optimizer_it_continues_too(name: str) -> None:
    before = optimizer(0.3, 0.6)
    run = build_scheduler(name, before, SMALL[name])
    for _ in range(7):
        run.step()
    after = optimizer(0.3, 0.6)
    after.load_state_dict(before.state_dict())
    resumed = build_scheduler(name, after, {**SMALL[name], "last_batch_iteration": 6})
    assert lrs_of(after) == lrs_of(before)
    run.step()
    resumed.step()
    assert lrs_of(after) == lrs_of(before)
    assert momenta_of(after) == momenta_of(before)


@pytest.mark.parametrize("name", SCHEDULES)
@given(iteration=st.integers(-1, 10_000))
def test_step_may_jump(name: str, iteration: int) -> None:
    target = optimizer(0.3, 0.6)
    schedule = build_scheduler(name, target, SMALL[name])
    schedule.step(iteration)
    assert isinstance(schedule, Schedule)
    assert schedule.last_batch_iteration == iteration
    assert schedule.get_lr() == schedule.get_last_lr() == lrs_of(target) == schedule.lr_at(iteration)
    assert all(lr >= 0 for lr in lrs_of(target))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_group_added_later_is_scheduled(name: str) -> None:
    target = optimizer(0.3)
    schedule = build_scheduler(name, target, SMALL[name])
    schedule.step()
    target.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3})
    schedule.step()
    first, second = lrs_of(target)
    assert first == second
    assert momenta_of(target)[0] == momenta_of(target)[1]


def test_any_object_with_param_groups_will_do() -> None:
    class Wrapper:
        param_groups = [{"params": [], "lr": 0.1}]

    schedule = WarmupLR(Wrapper(), 0.0, 0.5, 4, "linear")
    schedule.step(2)
    assert Wrapper.param_groups[0]["lr"] == 0.25


def test_tensors_are_filled_in_place() -> None:
    target = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5), capturable=True)
    lr = target.param_groups[0]["lr"]
    WarmupLR(target, 0.0, 0.5, 4, "linear").step(2)
    assert target.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


# Building by name, and errors


def test_the_documented_defaults() -> None:
    assert WarmupLR(optimizer()).lr_at(1000) == [0.001]
    assert WarmupLR(optimizer()).lr_at(1) == pytest.approx([0.001 * math.log(2) / math.log(1000)])
    assert LRRangeTest(optimizer()).lr_at(1999) == [0.002]
    assert OneCycle(optimizer(), 0.1, 0.5).lr_at(1999) == pytest.approx([0.5])
    assert WarmupDecayLR(optimizer(), 3000).lr_at(2000) == pytest.approx([0.0005])
    assert WarmupCosineLR(optimizer(1.0), 2000).lr_at(1999) == pytest.approx([0.0001])


def test_torch_s_schedulers_by_name() -> None:
    schedule = build_scheduler("StepLR", optimizer(), {"step_size": 2, "gamma": 0.5})
    assert type(schedule) is torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupDecay", {}, "did you mean 'WarmupDecayLR'"),
        ("warmuplr", {}, "did you mean 'WarmupLR'"),
        ("CosineAnealingLR", {}, "did you mean 'CosineAnnealingLR'"),
        ("ReduceLROnPlateau", {}, "needs a metric"),
        ("ChainedScheduler", {}, "made of schedulers"),
        ("WarmupLR", {"warmup_steps": 5}, "did you mean 'warmup_num_steps'"),
        ("StepLR", {"stepsize": 5}, "did you mean 'step_size'"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "needs cycle_max_lr"),
        ("WarmupDecayLR", {}, "needs total_num_steps"),
        ("WarmupLR", {"warmup_type": "lin"}, "did you mean 'linear'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps is a whole number of at least 0, got -1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps is a whole number"),
        ("WarmupLR", {"warmup_num_steps": float("inf")}, "warmup_num_steps is a whole number"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "warmup_max_lr is a number, or a list"),
        (
            "WarmupLR",
            {"warmup_min_lr": [0.1]},
            "one value for each of the optimizer's 2 parameter groups, got 1",
        ),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps is a whole number of at least 1"),
        (
            "LRRangeTest",
            {"lr_range_test_step_size": 0},
            "lr_range_test_step_size is a whole number of at least 1",
        ),
        ("LRRangeTest", {"lr_range_test_step_rate": None}, "lr_range_test_step_rate is a number"),
        (
            "OneCycle",
            {**SMALL["OneCycle"], "cycle_first_step_size": 0},
            "cycle_first_step_size is a whole number",
        ),
        ("OneCycle", {**SMALL["OneCycle"], "decay_step_size": -1}, "decay_step_size is a whole number"),
        ("OneCycle", {**SMALL["OneCycle"], "decay_lr_rate": -1}, "decay_lr_rate is at least 0"),
        ("OneCycle", {**SMALL["OneCycle"], "cycle_max_mom": [0.9]}, "cycle_max_mom as a list"),
        ("WarmupLR", {"last_batch_iteration": -2}, "last_batch_iteration is a whole number of at least -1"),
    ],
)
def test_errors_name_the_rule_and_the_mend(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build_scheduler(name, optimizer(0.1, 0.2), params)


def test_wrong_states_and_steps_are_refused() -> None:
    schedule = WarmupLR(optimizer())
    with pytest.raises(ValueError, match="has the key 'last_batch_iteration'"):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(ValueError, match="at least -1, got -5"):
        schedule.step(-5)
    with pytest.raises(TypeError, match="param_groups"):
        WarmupLR(torch.nn.Linear(1, 1))
