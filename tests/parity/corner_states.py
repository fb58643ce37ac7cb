"""What ranks run to look at optimizer states, schedules, loss scales and what an engine leaves behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_engine
import ds_zero
from ds_engine.lr_schedules import build_scheduler
from parity.corners import ADAM, MOMENTUM
from parity.problem import Batch, Problem, Small, batches, engine_config, plain_loss

Values = dict[str, torch.Tensor]
ACCUMULATION = 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAM,
    "SGD": MOMENTUM,
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.3},
}


def weights_of(model: nn.Module) -> Values:
    """Full fp32 values, by name."""
    return {n: ds_zero.safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}


def start(model: nn.Module, optimizer: Any, stage: int, **more: Any) -> Any:
    """An engine with the tests' usual settings."""
    config = engine_config(Problem(), "fp32", ACCUMULATION, 0.0, stage=stage, reduce_bucket_size=500)
    return ds_engine.initialize(model=model, optimizer=optimizer, config={**config, **more})[0]


def small() -> Small:
    """The model, the same at every call."""
    model = Problem().make()
    assert isinstance(model, Small)
    return model


def train(engine: Any, model: nn.Module, step: int) -> None:
    """One step of this rank."""
    for batch in batches(engine.world_size, ACCUMULATION, step)[engine.global_rank]:
        engine.backward(plain_loss(engine, model, batch))
        engine.step()


def plain(model: nn.Module, step: int, world: int) -> None:
    """Every rank's gradients of one step, averaged, in `.grad`."""
    model.zero_grad()
    for rank in batches(world, ACCUMULATION, step):
        for batch in rank:
            (plain_loss(model, model, batch) / (world * ACCUMULATION)).backward()


@dataclass(frozen=True)
class Resume:
    """A client optimizer with a past: its name, the ZeRO stage, and whether layer 0 is frozen when we begin."""

    optimizer: str
    stage: int
    frozen: bool
    made_by: str = "instance"
    """`instance`: an optimizer with a past; `callable`: one that is made by `initialize`."""


def _rewarmed(model: Small, job: Resume, world: int, past: int) -> torch.optim.Optimizer:
    optimizer = getattr(torch.optim, job.optimizer)(model.parameters(), **OPTIMIZERS[job.optimizer])
    for step in range(past):
        plain(model, step, world)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def resumed(jobs: list[Resume]) -> list[tuple[Values, Values]]:
    """Final weights of two plain steps and three of an engine; and of five plain ones. Layer 0 thaws at step 3."""
    return [(_with_engine(job), _without(job)) for job in jobs]


def _with_engine(job: Resume) -> Values:
    model, world = small(), dist.get_world_size()
    past = 2 if job.made_by == "instance" else 0
    optimizer: Any = _rewarmed(model, job, world, past)
    if job.made_by == "callable":
        kind = getattr(torch.optim, job.optimizer)
        optimizer = lambda parameters: kind(parameters, **OPTIMIZERS[job.optimizer])  # noqa: E731
    model.layers[0].requires_grad_(not job.frozen)
    engine = start(model, optimizer, job.stage)
    for step in range(past, 5):
        if step == 3:
            model.layers[0].requires_grad_(True)
        train(engine, model, step)
    weights = weights_of(model)
    engine.destroy()
    return weights


def _without(job: Resume) -> Values:
    model, world = small(), dist.get_world_size()
    past = 2 if job.made_by == "instance" else 0
    optimizer = _rewarmed(model, job, world, past)
    model.layers[0].requires_grad_(not job.frozen)
    for step in range(past, 5):
        if step == 3:
            model.layers[0].requires_grad_(True)
        plain(model, step, world)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "LRRangeTest": ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}),
    "OneCycle": ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 3}),
    "WarmupLR": ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}),
    "WarmupDecayLR": ("WarmupDecayLR", {"total_num_steps": 7, "warmup_max_lr": 0.1, "warmup_num_steps": 3}),
    "WarmupCosineLR": ("WarmupCosineLR", {"total_num_steps": 7, "warmup_num_steps": 3}),
    "torch's StepLR": ("StepLR", {"step_size": 2, "gamma": 0.1}),
}
NUM_RATES = 7


def _recorded(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Rates of the groups, noted whenever the optimizer steps."""
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append([float(g["lr"]) for g in o.param_groups]))
    return seen


def _two_groups(model: Small) -> torch.optim.Optimizer:
    groups = [{"params": model.head.parameters(), "lr": 0.03}, {"params": model.layers.parameters()}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.8)


def rates(name: str, where: str) -> tuple[list[list[float]], list[list[float]]]:
    """Learning rates that the optimizer has seen in each step: of an engine, and of the schedule by hand.

    Args:
        name: of the schedule.
        where: `configuration`; `client`: made on the client's optimizer before initialize, and given;
            `callable`: made by initialize; or `outside`: made before and stepped by the client.
    """
    kind, params = SCHEDULES[name]
    model = small()
    optimizer = _two_groups(model)
    ours = _recorded(optimizer)
    config: dict[str, Any] = {}
    scheduler: Any = None
    if where == "configuration":
        config["scheduler"] = {"type": kind, "params": params}
    elif where == "callable":
        scheduler = lambda optimizer: build_scheduler(kind, optimizer, params)  # noqa: E731
    else:
        scheduler = build_scheduler(kind, optimizer, params)
    full = {**engine_config(Problem(), "fp32", ACCUMULATION, 0.0, stage=2), **config}
    engine, *_ = ds_engine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=None if where == "outside" else scheduler, config=full
    )
    for step in range(NUM_RATES):
        train(engine, model, step)
        if where == "outside":
            scheduler.step()
    engine.destroy()
    by_hand = _two_groups(small())
    theirs = _recorded(by_hand)
    schedule = build_scheduler(kind, by_hand, params)
    for _ in range(NUM_RATES):
        by_hand.step()
        schedule.step()
    return ours, theirs


@dataclass(frozen=True)
class Overflow:
    """An fp16 run: which steps overflow on the last rank, the `fp16` section, the stage."""

    steps: tuple[int, ...]
    fp16: dict[str, Any]
    stage: int


def at_the_smallest_scale(stage: int) -> tuple[list[float], str]:
    """On a rank: scales while every step overflows, down to min_loss_scale, and what is raised then."""
    model = small()
    fp16 = {"enabled": True, "initial_scale_power": 5, "hysteresis": 1, "min_loss_scale": 8}
    engine = start(model, torch.optim.AdamW(model.parameters(), **ADAM), stage, fp16=fp16)
    before = weights_of(model)
    scales = []
    message = ""
    for step in range(5):
        try:
            for batch in batches(engine.world_size, ACCUMULATION, step)[engine.global_rank]:
                engine.backward(plain_loss(engine, model, batch) * float("inf"))
                engine.step()
        except ds_engine.EngineError as error:
            message = str(error)
            break
        scales.append(engine.loss_scale)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    engine.destroy()
    return scales, message


@dataclass
class Trace:
    """After every step: the scale, whether it was applied, weights and states."""

    scales: list[float]
    applied: list[bool]
    values: list[Values]


def overflowing(jobs: list[Overflow]) -> list[Trace]:
    """On a rank: six steps of each."""
    return [_overflowing(job) for job in jobs]


def _overflowing(job: Overflow) -> Trace:
    model = small()
    section = {"fp16": {"enabled": True, **job.fp16}}
    engine = start(model, torch.optim.AdamW(model.parameters(), **ADAM), job.stage, **section)
    trace = Trace([], [], [])
    good = 0
    for step in range(6):
        bad = step in job.steps
        for batch in batches(engine.world_size, ACCUMULATION, good)[engine.global_rank]:
            loss = plain_loss(engine, model, batch)
            if bad and engine.global_rank == engine.world_size - 1 and batch.micro == 0:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
        good += not bad
        trace.scales.append(engine.loss_scale)
        trace.applied.append(engine.was_step_applied())
        values = weights_of(model)
        for name, parameter in model.named_parameters():
            if good:
                values[f"{name}/m"] = ds_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
        trace.values.append(values)
    assert engine.skipped_steps == len(job.steps) and engine.global_steps == 6
    engine.destroy()
    return trace


@dataclass
class Footprint:
    """What a process holds."""

    rss_bytes: int
    fds: int
    threads: int
    groups: int
    tensors: int


def footprint() -> Footprint:
    """This process now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    groups = len(dist.distributed_c10d._world.pg_map)
    num_fds = len(os.listdir("/proc/self/fd"))
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE"), num_fds, threading.active_count(), groups, tensors)


def cycles(count: int, stage: int, same_model: bool) -> list[Footprint]:
    """On a rank: initialize, train, destroy, again and again; the footprint after each cycle."""
    found = []
    model: nn.Module = nn.Linear(1, 1)
    for cycle in range(count):
        if not same_model or cycle == 0:
            model = nn.Sequential(nn.Embedding(40, 256), nn.Linear(256, 1024), nn.Linear(1024, 7))
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        engine = start(model, optimizer, stage)
        _cycle(engine, model)
        engine.destroy()
        del engine, optimizer
        found.append(footprint())
    return found


def _cycle(engine: Any, model: nn.Module) -> None:
    pooled: Callable[[Batch], torch.Tensor] = lambda b: engine(b.tokens).mean(1)  # noqa: E731
    for step in range(2):
        for batch in batches(engine.world_size, ACCUMULATION, step)[engine.global_rank]:
            engine.backward((pooled(batch) - batch.targets).square().mean())
            engine.step()
