"""Ways of calling an engine within a step, and what plain PyTorch's gradient is for each.

A way is a procedure over the four micro-batches of a step, and the weight with which it counts each of
them: the reference is the usual loss times that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import ds_engine
import ds_zero
from ds_engine.events import Event
from parity.corners import ADAM
from parity.problem import STEPS, Batch, Loss, Outcome, Problem, batches, engine_config, plain_loss

MICROS = 4
Backward = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Step:
    """One step of one rank: what a procedure has to hand."""

    engine: Any
    model: nn.Module
    micros: list[Batch]
    backward: Backward
    loss: Loss

    def once(self, batch: Batch, factor: float = 1.0) -> None:
        """Forward and backward, without `step`."""
        self.backward(self.loss(self.engine, self.model, batch) * factor)


def usual(step: Step) -> None:
    """Backward and step, four times."""
    for batch in step.micros:
        step.once(batch)
        step.engine.step()


def in_evaluation_mode(step: Step) -> None:
    """Training with the model in evaluation mode, as one does to keep batch norm's statistics."""
    step.engine.eval()
    usual(step)


def last_outside(step: Step) -> None:
    """Three under no_sync, the last outside."""
    with step.engine.no_sync():
        for batch in step.micros[:-1]:
            step.once(batch)
    step.once(step.micros[-1])
    step.engine.step()


def all_inside(step: Step) -> None:
    """All under no_sync; `step` reduces."""
    with step.engine.no_sync():
        for batch in step.micros:
            step.once(batch)
    step.engine.step()


def inside_after(step: Step) -> None:
    """The first outside no_sync, the others inside: collected after something was reduced."""
    step.once(step.micros[0])
    with step.engine.no_sync():
        for batch in step.micros[1:]:
            step.once(batch)
    step.engine.step()


def _inside(batch: Batch) -> bool:
    return batch.micro < 1 + batch.rank % 2 or batch.micro == MICROS - 1


def uneven_inside(step: Step) -> None:
    """Odd ranks run one more backward under no_sync: whatever is reduced there meets nobody."""
    used = [batch for batch in step.micros if _inside(batch)]
    with step.engine.no_sync():
        for batch in used[:-1]:
            step.once(batch)
    step.once(used[-1])
    step.engine.step()


def boundary_by_hand(step: Step) -> None:
    """The caller says which micro-batch is the last."""
    for batch in step.micros:
        step.engine.set_gradient_accumulation_boundary(batch.micro == MICROS - 1)
        step.once(batch)
        step.engine.step()
    step.engine.set_gradient_accumulation_boundary(None)


def two_losses(step: Step) -> None:
    """Two backwards a micro-batch, as a GAN's real and fake."""
    for batch in step.micros:
        step.once(batch, 0.25)
        step.once(batch, 0.75)
        step.engine.step()


def twice_through_one_graph(step: Step) -> None:
    """One graph, kept for a second backward."""
    for batch in step.micros:
        loss = step.loss(step.engine, step.model, batch)
        step.engine.backward(loss, retain_graph=True)
        step.backward(loss)
        step.engine.step()


def divided_by_hand(step: Step) -> None:
    """The caller has divided the loss by the number of micro-batches."""
    for batch in step.micros:
        step.engine.backward(step.loss(step.engine, step.model, batch) / MICROS, scale_wrt_gas=False)
        step.engine.step()


def _elsewhere(batch: Batch) -> bool:
    return batch.rank == 1 and batch.micro in (1, MICROS - 1)


def loss_elsewhere(step: Step) -> None:
    """Rank 1's loss does not touch the engine in two micro-batches, the boundary's among them."""
    foreign = torch.ones(3, requires_grad=True)
    for batch in step.micros:
        if _elsewhere(batch):
            step.backward(foreign.sum())
        else:
            step.once(batch)
        step.engine.step()


def _by_hand(step: Step, batch: Batch) -> None:
    parameters = list(step.model.parameters())
    gradients = torch.autograd.grad(step.loss(step.model, step.model, batch), parameters)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient


def gradients_by_hand(step: Step) -> None:
    """The caller writes `.grad` instead of running backward, once between and once at the boundary."""
    for batch in step.micros:
        _by_hand(step, batch) if batch.micro in (1, MICROS - 1) else step.once(batch)
        step.engine.step()


def by_hand_on_one_rank(step: Step) -> None:
    """Rank 0 adds to `.grad` after the boundary's backward; the others don't."""
    for batch in step.micros:
        step.once(batch)
        if batch.rank == 0 and batch.micro == MICROS - 1:
            _by_hand(step, batch)
        step.engine.step()


def _break_off(step: Step, batch: Batch) -> None:
    """A backward that fails halfway on every rank, and is caught."""

    def fail(gradient: torch.Tensor) -> None:
        raise FloatingPointError("halfway")

    x = step.model.embedding(batch.tokens)  # type: ignore[operator]
    x.register_hook(fail)
    out = step.model.head(x.mean(1))  # type: ignore[operator]
    with suppress(FloatingPointError):
        step.backward((out - batch.targets).square().mean())
        raise AssertionError("backward was to fail")


def after_a_failure(step: Step) -> None:
    """A backward fails at the start of a step; the step goes on through the engine."""
    _break_off(step, step.micros[0])
    usual(step)


def after_a_failure_past_forward(step: Step) -> None:
    """The same, but the next losses come from the model itself, so the engine's forward clears nothing up."""
    _break_off(step, step.micros[0])
    for batch in step.micros:
        step.backward(step.loss(step.model, step.model, batch))
        step.engine.step()


def after_a_failure_in_the_middle(step: Step) -> None:
    """The same after a micro-batch that went well: it is forgotten too, and the step begins anew."""
    step.backward(step.loss(step.engine, step.model, step.micros[2]))
    step.engine.step()
    _break_off(step, step.micros[0])
    usual(step)


def zeroed(step: Step) -> None:
    """Gradients of another loss are thrown away first: with zero_grad of the engine, then of its optimizer."""
    step.once(step.micros[2], 100.0)
    step.engine.zero_grad()
    step.once(step.micros[1], 100.0)
    step.engine.optimizer.zero_grad()
    usual(step)


@dataclass(frozen=True)
class Way:
    """A procedure, the accumulation that the engine is told, and how much a micro-batch counts in the sum."""

    run: Callable[[Step], None]
    accumulation: int = MICROS
    weight: Callable[[Batch], float] = lambda batch: 1.0


WAYS: dict[str, Way] = {
    "usual": Way(usual),
    "evaluation mode": Way(in_evaluation_mode),
    "no_sync, last outside": Way(last_outside, 1),
    "no_sync, all inside": Way(all_inside, 1),
    "no_sync after a backward": Way(inside_after, 1),
    "no_sync, uneven": Way(uneven_inside, 1, lambda batch: float(_inside(batch))),
    "boundary by hand": Way(boundary_by_hand, 1),
    "two backwards": Way(two_losses),
    "one graph twice": Way(twice_through_one_graph, weight=lambda batch: 2.0),
    "divided by hand": Way(divided_by_hand),
    "loss elsewhere": Way(loss_elsewhere, weight=lambda batch: 0.0 if _elsewhere(batch) else 1.0),
    "gradients by hand": Way(gradients_by_hand),
    "by hand on one rank": Way(
        by_hand_on_one_rank, weight=lambda b: 2.0 if b.rank == 0 and b.micro == MICROS - 1 else 1.0
    ),
    "after a failure": Way(after_a_failure),
    "after a failure, past forward": Way(after_a_failure_past_forward),
    "after a failure, in the middle": Way(after_a_failure_in_the_middle),
    "zeroed": Way(zeroed),
}


def _weighted(way: str, loss: Loss, call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    chosen = WAYS[way]
    return loss(call, module, batch) * (chosen.weight(batch) * MICROS / chosen.accumulation)


def equivalent(way: str, loss: Loss = plain_loss, model: Callable[[], nn.Module] | None = None) -> Problem:
    """What the reference solves for a way of calling, over four micro-batches."""
    more = {} if model is None else {"model": model}
    return Problem(loss=partial(_weighted, way, loss), arguments=ADAM, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """A run of `trained`: the way, the settings, and whether backward is the loss's own."""

    way: str
    zero: dict[str, Any]
    plain: bool
    loss: Loss = plain_loss
    model: Callable[[], nn.Module] | None = None
    precision: str = "fp32"
    more: dict[str, Any] | None = None


def trained(job: Job) -> Outcome:
    """On a rank: an engine called in that way."""
    way = WAYS[job.way]
    problem = equivalent(job.way, job.loss, job.model)
    model = problem.make()
    config = engine_config(problem, job.precision, way.accumulation, 0.0, **job.zero)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    engine, *_ = ds_engine.initialize(model=model, optimizer=optimizer, config={**config, **(job.more or {})})
    rank, world = engine.global_rank, engine.world_size
    backward: Backward = torch.Tensor.backward if job.plain else engine.backward
    gradients: dict[str, torch.Tensor | None] = {}

    def look(engine: Any) -> None:
        gradients.update({n: ds_zero.safe_get_full_grad(p) for n, p in model.named_parameters()})

    for step in range(STEPS):
        if step == STEPS - 1:
            engine.events.subscribe(Event.BOUNDARY, look)
        way.run(Step(engine, model, batches(world, MICROS, step)[rank], backward, job.loss))
    assert engine.global_steps == STEPS and engine.was_step_applied()
    weights = {n: ds_zero.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return Outcome([], gradients, weights, norm)


def trained_all(jobs: list[Job]) -> list[Outcome]:
    """On a rank: several, one after the other."""
    return [trained(job) for job in jobs]
