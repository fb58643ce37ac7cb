"""Looking at and changing states in mid-training, against the same changes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_zero
from parity.corner_states import ACCUMULATION, Values, plain, small, start, train, weights_of
from parity.corners import ADAM
from parity.problem import Small, batches, plain_loss


@dataclass(frozen=True)
class Access:
    """What is changed between or within steps (a key of CHANGES), the stage, the precision section."""

    change: str
    stage: int
    precision: str = "fp32"

    @property
    def more(self) -> dict[str, Any]:
        """The section of the configuration."""
        return {} if self.precision == "fp32" else {self.precision: {"enabled": True}}


def _touched(model: nn.Module) -> list[nn.Parameter]:
    """A matrix, a bias and the embedding: whole pieces and cut ones."""
    assert isinstance(model, Small)
    return [model.head.weight, model.layers[0][1].bias, model.embedding.weight]


def _values(model: Small) -> None:
    for p in _touched(model):
        ds_zero.safe_set_full_fp32_param(p, ds_zero.safe_get_full_fp32_param(p) * 0.5 + 0.001)


def _values_plain(model: Small, optimizer: torch.optim.Optimizer) -> None:
    for p in _touched(model):
        p.data.mul_(0.5).add_(0.001)


def _local_values(model: Small) -> None:
    for p in _touched(model):
        if (piece := ds_zero.safe_get_local_fp32_param(p)) is not None:
            ds_zero.safe_set_local_fp32_param(p, piece.clone() * 0.5 + 0.001)
    # Ranks see each other's pieces after the next step; the passes of this one are to see them too.
    for p in _touched(model):
        ds_zero.safe_set_full_fp32_param(p, ds_zero.safe_get_full_fp32_param(p))


def _states(model: Small) -> None:
    for p in _touched(model):
        ds_zero.safe_set_full_optimizer_state(p, ds_zero.safe_get_full_optimizer_state(p, "exp_avg") * 2, "exp_avg")


def _states_plain(model: Small, optimizer: torch.optim.Optimizer) -> None:
    for p in _touched(model):
        optimizer.state[p]["exp_avg"].mul_(2)


def _local_states(model: Small) -> None:
    for p in _touched(model):
        if (piece := ds_zero.safe_get_local_optimizer_state(p, "exp_avg")) is not None:
            ds_zero.safe_set_local_optimizer_state(p, piece.clone() * 2, "exp_avg")


def _gradients(model: Small) -> None:
    for p in _touched(model):
        gradient = ds_zero.safe_get_full_grad(p)
        assert gradient is not None
        ds_zero.safe_set_full_grad(p, gradient * -3)


def _gradients_plain(model: Small, optimizer: torch.optim.Optimizer) -> None:
    for p in _touched(model):
        assert p.grad is not None
        p.grad.mul_(-3)


def _local_gradients(model: Small) -> None:
    for p in _touched(model):
        if (piece := ds_zero.safe_get_local_grad(p)) is not None:
            ds_zero.safe_set_local_grad(p, piece * -3)


def _load(model: Small) -> None:
    raise AssertionError("done by the engine")


def _load_plain(model: Small, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(other_weights(model))


def other_weights(model: nn.Module) -> Values:
    """Values that bf16 holds exactly, so that loading them in any precision is exact."""
    draw = torch.Generator().manual_seed(5)
    return {n: (torch.randn(v.shape, generator=draw) * 0.3).bfloat16().to(v.dtype) for n, v in model.named_parameters()}


# By name: in the step before backward, or after the boundary's backward; ours, and plain PyTorch's.
CHANGES: dict[str, tuple[bool, Callable[..., None], Callable[..., None]]] = {
    "values": (True, _values, _values_plain),
    "local values": (True, _local_values, _values_plain),
    "states": (True, _states, _states_plain),
    "local states": (True, _local_states, _states_plain),
    "gradients": (False, _gradients, _gradients_plain),
    "local gradients": (False, _local_gradients, _gradients_plain),
    "load_state_dict": (True, _load, _load_plain),
}


def changed(jobs: list[Access]) -> list[tuple[Values, Values]]:
    """Final weights of an engine and of plain PyTorch: a step, a changed one, another."""
    return [(_changed(job), _changed_plain(job)) for job in jobs]


def _changed(job: Access) -> Values:
    before, change, _ = CHANGES[job.change]
    model = small()
    engine = start(model, torch.optim.AdamW(model.parameters(), **ADAM), job.stage, **job.more)
    train(engine, model, 0)
    if job.change == "load_state_dict":
        engine.load_state_dict(other_weights(model))
    elif before:
        change(model)
    for batch in batches(engine.world_size, ACCUMULATION, 1)[engine.global_rank]:
        engine.backward(plain_loss(engine, model, batch))
        if not before and engine.is_gradient_accumulation_boundary():
            change(model)
        engine.step()
    train(engine, model, 2)
    state = engine.state_dict()
    with ds_zero.GatheredParameters(model):
        for name, value in model.named_parameters():
            assert torch.equal(state[name], value.detach()), name
    weights = weights_of(model)
    engine.destroy()
    return weights


def _changed_plain(job: Access) -> Values:
    before, _, change = CHANGES[job.change]
    model, world = small(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(3):
        if step == 1 and before:
            change(model, optimizer)
        plain(model, step, world)
        if step == 1 and not before:
            change(model, optimizer)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def partial_gradients(stage: int) -> list[tuple[Values, Values, Values]]:
    """After each micro-batch: the full gradient as read, twice; the plain sum so far; the local pieces put together."""
    model, twin = small(), small()
    engine = start(model, torch.optim.AdamW(model.parameters(), **ADAM), stage, prescale_gradients=stage != 1)
    world = engine.world_size
    found = []
    for micro in range(ACCUMULATION):
        batch = batches(world, ACCUMULATION, 0)[engine.global_rank][micro]
        engine.backward(plain_loss(engine, model, batch))
        for rank in batches(world, ACCUMULATION, 0):
            (plain_loss(twin, twin, rank[micro]) / (world * ACCUMULATION)).backward()
        ours: Values = {}
        pieces: Values = {}
        for name, parameter in model.named_parameters():
            ds_zero.safe_get_full_grad(parameter)  # reading changes nothing
            gradient = ds_zero.safe_get_full_grad(parameter)
            assert gradient is not None
            ours[name] = gradient
            piece = ds_zero.safe_get_local_grad(parameter)
            pieces[name] = torch.tensor([0.0]) if piece is None else piece.square().sum().reshape(1)
            if stage:
                dist.all_reduce(pieces[name])
        theirs = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
        found.append((ours, theirs, pieces))
        engine.step()
    engine.destroy()
    return found


def reloaded(stage: int) -> tuple[Values, Values]:
    """Masters after the bf16 model's own values were loaded; and those values."""
    model = small()
    engine = start(model, torch.optim.AdamW(model.parameters(), **ADAM), stage, bf16={"enabled": True})
    train(engine, model, 0)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    masters = weights_of(model)
    engine.destroy()
    return masters, {name: value.float() for name, value in state.items()}


class Spare(nn.Module):
    """Two layers, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def gradient_of_unused(stage: int, beside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The unused layer's weight after a step for which its gradient was set to one; and what SGD makes of it.

    `beside`: another engine is there, and backward is the loss's own.
    """
    other = nn.Linear(2, 2)
    another = start(other, torch.optim.SGD(other.parameters(), lr=0.1), stage) if beside else None
    model = Spare()
    expected = model.spare.weight.detach() - 0.1
    engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    for _ in range(ACCUMULATION):
        loss = engine(torch.ones(2, 4)).sum()
        if beside:
            loss.backward()
        else:
            engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            ds_zero.safe_set_full_grad(model.spare.weight, torch.ones(3, 4))
        engine.step()
    found = weights_of(model)["spare.weight"]
    engine.destroy()
    if another is not None:
        another.destroy()
    return found, expected
