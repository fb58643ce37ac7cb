"""Adam without bias correction, which torch's Adams always make."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ds_engine.optim_dense import DenseOptimizer, at_least_zero, check_betas


class UncorrectedAdam(DenseOptimizer):
    """Adam with its averages as they are, as BERT was trained: early steps are smaller.

    For a parameter w with gradient g and averages m and v, both 0 at first,

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w * (1 - lr * weight_decay) - lr * m / (sqrt(v) + eps)

    With `adam_w_mode=False` the weight decay is added to g instead.

    From "Adam: A Method for Stochastic Optimization" (Kingma and Ba, 2015, arXiv:1412.6980), algorithm 1
    without its two bias corrections; "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019).

    The states of a parameter are `exp_avg` and `exp_avg_sq`, in its dtype. The update of an element depends
    on that element alone.

    Args:
        params: parameters, or dicts that define parameter groups.
        lr: learning rate, at least 0. Default 1e-3.
        betas: weights of the averages' past, each in [0, 1). Default (0.9, 0.999).
        eps: added to the denominator, at least 0. Default 1e-8.
        weight_decay: at least 0. Default 0.0.
        adam_w_mode: decay weights rather than add to the gradient. Default True.
        maximize: go up the gradient instead of down. Default False.

    Raises:
        ValueError: a value out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        maximize: bool = False,
    ) -> None:
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"adam_w_mode": adam_w_mode, "maximize": maximize})

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        means, squares = self._states(params, "exp_avg", "exp_avg_sq")
        if group["weight_decay"] and group["adam_w_mode"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        below = torch._foreach_sqrt(squares)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(params, means, below, -group["lr"])
