"""Lion: the sign of an interpolated momentum as the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """The Lion optimizer.

    For a parameter w with gradient g and momentum m,

        w = w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    From "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023, arXiv:2302.06675), algorithm 2.
    The defaults are those of DeepSpeed's Lion; the paper advises betas of (0.9, 0.99) and a tenth of Adam's
    learning rate.

    The state of a parameter is `exp_avg`, in its dtype. The update of an element depends on that element
    alone.

    Args:
        params: parameters, or dicts that define parameter groups.
        lr: learning rate, at least 0. Default 1e-3.
        betas: weights of the momentum in the update and in its own average, each in [0, 1). Default (0.9,
            0.999).
        weight_decay: decoupled weight decay, at least 0. Default 0.0.
        maximize: go up the gradient instead of down. Default False.

    Raises:
        ValueError: a value out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        at_least_zero(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. Returns the loss of `closure`, where one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grads = gradients(params, "Lion", group["maximize"])
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        averages = [self.state[param]["exp_avg"] for param in params]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        updates = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(averages, grads, 1 - beta2)


def gradients(params: list[torch.Tensor], optimizer: str, maximize: bool) -> list[torch.Tensor]:
    """The gradients of `params` in their parameters' dtypes, negated to maximize.

    Raises:
        ValueError: a gradient is sparse.
    """
    grads = [param.grad for param in params if param.grad is not None]
    if any(grad.is_sparse for grad in grads):
        raise ValueError(
            f"{optimizer} needs dense gradients, got a sparse one: build the embedding with sparse=False, or "
            "use SparseAdam"
        )
    grads = [grad.to(param.dtype) for grad, param in zip(grads, params)]
    return [-grad for grad in grads] if maximize else grads


def at_least_zero(**values: float) -> None:
    """Check that each value is at least 0.

    Raises:
        ValueError: one is not.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is at least 0, got {value!r}: give a number from 0 up")


def check_betas(betas: tuple[float, float]) -> None:
    """Check that `betas` are two numbers in [0, 1).

    Raises:
        ValueError: they are not.
    """
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas are two numbers from 0 up to, but not including, 1, got {betas!r}: give two such numbers"
        )
