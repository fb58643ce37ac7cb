"""LAMB: Adam's update, scaled for each parameter by the ratio of the weight's norm to the update's."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ds_engine.optim_dense import DenseOptimizer, at_least_zero, check_betas


class Lamb(DenseOptimizer):
    """The LAMB optimizer.

    For a parameter w, with m and v Adam's averages of the gradient and of its square (bias-corrected),

        u = m / (sqrt(v) + eps) + weight_decay * w            or  m / sqrt(v + eps) + ... with eps_inside_sqrt
        w = w - lr * c * u
        c = min(max_coeff, max(min_coeff, |w| / |u|)),        1 where either norm is 0

    The norms are over a whole parameter, so its state can't be cut at will: see `elementwise`.

    From "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (You et al., 2019,
    arXiv:1904.00962), algorithm 2; the signature is that of DeepSpeed's documented `FusedLamb`.

    The state of a parameter is `exp_avg` and `exp_avg_sq`, in its dtype, and `step`.

    Args:
        params: parameters, or dicts that define parameter groups.
        lr: learning rate, at least 0. Default 1e-3.
        bias_correction: divide the averages by 1 - beta**step. Default True.
        betas: weights of the two running averages, each in [0, 1). Default (0.9, 0.999).
        eps: keeps the denominator from 0. Default 1e-8.
        eps_inside_sqrt: add `eps` before the square root is taken. Default False.
        weight_decay: at least 0. Default 0.0.
        max_grad_norm: scale the gradients so that their norm over all parameters is at most this; 0 leaves
            them alone. Default 0.0.
        max_coeff: highest value of c. Default 10.0.
        min_coeff: lowest value of c. Default 0.01.
        amsgrad: not part of LAMB; only False is accepted. Default False.

    Raises:
        ValueError: a value out of its range, or `amsgrad`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        at_least_zero(min_coeff=min_coeff)
        check_betas(betas)
        if max_coeff < min_coeff:
            raise ValueError(
                f"max_coeff is at least min_coeff, got {max_coeff!r} and {min_coeff!r}: "
                "raise the one or lower the other"
            )
        if amsgrad:
            raise ValueError("amsgrad is false for LAMB, got true: leave it out, or use Adam")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": tuple(betas),
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    grad_norm: torch.Tensor | None = None
    """2-norm of the gradients of all parameters, for one who knows more of them than this optimizer holds (ZeRO
    sets it before each step). Default: computed."""

    def _prepare(self) -> None:
        self._norm = self.grad_norm
        if self._norm is not None or not any(group["max_grad_norm"] for group in self.param_groups):
            return
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad.float() for param in params if param.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(grads)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        if self._norm is not None and group["max_grad_norm"]:
            scale = (group["max_grad_norm"] / self._norm).clamp(max=1.0)
            grads = [grad * scale.to(grad) for grad in grads]
        means, squares = self._states(params, "exp_avg", "exp_avg_sq")
        for param in params:
            step = self.state[param].setdefault("step", torch.zeros(()))  # on the CPU: reading it waits for nothing
            step += 1
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        for param, mean, square in zip(params, means, squares):
            update = self._direction(group, param, mean, square)
            # The coefficient stays on the device: reading it would wait for the whole queue at every
            # parameter.
            ratio = (_wide_norm(param) / _wide_norm(update)).clamp(group["min_coeff"], group["max_coeff"])
            coefficient = torch.where(param.any() & update.any(), ratio, torch.ones_like(ratio))
            param.sub_(update * (group["lr"] * coefficient))

    def _direction(
        self, group: dict[str, Any], param: torch.Tensor, mean: torch.Tensor, square: torch.Tensor
    ) -> torch.Tensor:
        """Adam's update with weight decay, not yet scaled."""
        if group["bias_correction"]:
            step = int(self.state[param]["step"])
            mean = mean / (1 - group["betas"][0] ** step)
            square = square / (1 - group["betas"][1] ** step)
        if group["eps_inside_sqrt"]:
            denominator = (square + group["eps"]).sqrt_()
        else:
            denominator = square.sqrt().add_(group["eps"])
        return (mean / denominator).add_(param, alpha=group["weight_decay"])


def _wide_norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
