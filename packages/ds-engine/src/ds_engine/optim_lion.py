"""Lion: the sign of an interpolated momentum as the update."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ds_engine.optim_dense import DenseOptimizer, at_least_zero, check_betas


class Lion(DenseOptimizer):
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

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        (averages,) = self._states(params, "exp_avg")
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        updates = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(averages, grads, 1 - beta2)
