"""What the ranks of the pool run: an engine, or DDP, over the parity problem."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ds_engine
import ds_zero
from parity.problem import STEPS, Outcome, Problem, batches, engine_config


def with_engine(
    problem: Problem,
    precision: str,
    accumulation: int,
    clip: float,
    zero: dict[str, Any],
    more: dict[str, Any] | None = None,
    plain_backward: bool = False,
) -> Outcome:
    """Our engine on this rank."""
    model = problem.make()
    config = {**engine_config(problem, precision, accumulation, clip, **zero), **(more or {})}
    optimizer = getattr(torch.optim, problem.optimizer)(problem.groups(model), **problem.arguments)
    engine, *_ = ds_engine.initialize(model=model, optimizer=optimizer, config=config)
    rank, world = engine.global_rank, engine.world_size
    losses: list[float] = []
    gradients: dict[str, torch.Tensor | None] = {}
    for step in range(STEPS):
        problem.before_step(model, step)
        total = torch.zeros(1)
        for batch in batches(world, accumulation, step)[rank]:
            loss = problem.loss(engine, model, batch)
            total += loss.detach() / (world * accumulation)
            if plain_backward:
                loss.backward()
            else:
                engine.backward(loss)
            if step == STEPS - 1 and engine.is_gradient_accumulation_boundary():
                gradients = {n: ds_zero.safe_get_full_grad(p) for n, p in model.named_parameters()}
            engine.step()
        dist.all_reduce(total)
        losses.append(float(total))
    weights = {n: ds_zero.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    if precision != "fp32":
        with ds_zero.GatheredParameters(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach(), weights[name].to(parameter.dtype)), name
    assert engine.was_step_applied()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    engine.destroy()
    return Outcome(losses, gradients, weights, norm)


def many(cells: list[tuple[Any, ...]]) -> list[Outcome]:
    """Several engines one after the other: one call for a block of the matrix."""
    return [with_engine(*cell) for cell in cells]


def with_ddp(problem: Problem, accumulation: int, clip: float) -> Outcome:
    """torch's DistributedDataParallel on this rank, in fp32."""
    from contextlib import nullcontext

    from torch.nn.parallel import DistributedDataParallel

    model = problem.make()
    ddp = DistributedDataParallel(model)
    optimizer = getattr(torch.optim, problem.optimizer)(problem.groups(model), **problem.arguments)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, gradients, norm = [], {}, 0.0
    for step in range(STEPS):
        total = torch.zeros(1)
        for batch in batches(world, accumulation, step)[rank]:
            last = batch.micro == accumulation - 1
            with nullcontext() if last else ddp.no_sync():
                loss = problem.loss(ddp, model, batch)
                total += loss.detach() / (world * accumulation)
                (loss / accumulation).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip else float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total))
    return Outcome(losses, dict(gradients), {n: p.detach().clone() for n, p in model.named_parameters()}, norm)
