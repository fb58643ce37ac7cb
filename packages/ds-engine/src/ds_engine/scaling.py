"""Where the loss scale enters and leaves an engine, so that any backward is scaled right.

`engine.backward(loss)` multiplies the loss. A plain `loss.backward()` can't, so an fp16 engine's outputs
multiply the gradient that comes in by its scale, and its inputs divide what goes out. Both read the scale
that the running backward already carries: what one engine multiplied, another with its own scale corrects,
so one loss may span several engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ds_engine.precision import LossScaler


class Carried:
    """The factor by which the loss of the running backward was multiplied; 1 for a plain one.

    One object for the process: autograd runs hooks on threads of its own, and gives them nothing else.
    """

    def __init__(self) -> None:
        self.scale = 1.0

    @contextmanager
    def set(self, scale: float) -> Iterator[None]:
        """While a backward of a loss times `scale` runs."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before


CARRIED = Carried()


class _Rescale(torch.autograd.Function):
    """The identity; its backward multiplies by scaler / carried going in, and the reverse going out."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scaler: LossScaler, entering: bool) -> torch.Tensor:
        ctx.scaler, ctx.entering = scaler, entering
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        factor = ctx.scaler.scale / CARRIED.scale
        if factor != 1.0:
            gradient = gradient * (factor if ctx.entering else 1.0 / factor)
        return gradient, None, None


def scale_gradients(tree: Any, scaler: LossScaler, entering: bool) -> Any:
    """Marks every tensor of `tree` that carries a gradient. `entering`: outputs, where gradients come in."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: _Rescale.apply(tensor, scaler, entering) if tensor.requires_grad else tensor,
        tree,
    )
