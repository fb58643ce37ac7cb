"""Small optimizers for tests: parameters with gradients that depend on the step alone, and what groups say."""

from __future__ import annotations

from typing import Any

import torch


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """[3, 4] and [5, 2], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(3, 4), (5, 2)]]


def set_grads(params: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients of a step, the same at every call."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], num_steps: int = 5) -> None:
    """Steps with those gradients."""
    for step in range(num_steps):
        set_grads(params, step)
        optimizer.step()


def assert_same(ours: list[torch.nn.Parameter], theirs: list[Any]) -> None:
    """Equal to the rounding of their dtype."""
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.detach(), other.detach())


def scheduled(*lrs: float, kind: str = "Adam") -> torch.optim.Optimizer:
    """Adam, or SGD with momentum, with a group for each learning rate (default: one, of 0.1)."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1,)]
    if kind == "Adam":
        return torch.optim.Adam(groups, betas=(0.88, 0.99))
    return torch.optim.SGD(groups, momentum=0.7)


def lrs_of(optimizer: Any) -> list[float]:
    """The learning rate of every group."""
    return [group["lr"] for group in optimizer.param_groups]


def momenta_of(optimizer: Any) -> list[float]:
    """The momentum of every group, or its first beta."""
    return [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]
