"""DenseOptimizer: what ds_engine's own optimizers share: the step around the update, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DenseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates the parameters of a group together, from dense gradients.

    A subclass gives `_update`, and may `_prepare` a step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. Returns the loss of `closure`, where one is given.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params, self._gradients(params, group.get("maximize", False)))
        return loss

    def _prepare(self) -> None:
        """Before the first group of a step."""

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """One update of `params`, which all have a gradient. `grads` may be the gradients themselves: don't write."""
        raise NotImplementedError

    def _gradients(self, params: list[torch.Tensor], maximize: bool) -> list[torch.Tensor]:
        """The gradients of `params` in their parameters' dtypes, negated to maximize."""
        grads = [param.grad for param in params if param.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise ValueError(
                f"{type(self).__name__} needs dense gradients, got a sparse one: build the embedding with "
                "sparse=False, or use SparseAdam"
            )
        grads = [grad.to(param.dtype) for grad, param in zip(grads, params)]
        return [-grad for grad in grads] if maximize else grads

    def _states(self, params: list[torch.Tensor], *names: str) -> list[list[torch.Tensor]]:
        """The states of `params`, name by name; zeros at first, in the parameters' shapes and dtypes."""
        for param in params:
            for name in names:
                if name not in self.state[param]:
                    self.state[param][name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [[self.state[param][name] for param in params] for name in names]


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
