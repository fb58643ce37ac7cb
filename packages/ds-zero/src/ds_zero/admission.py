"""What a ShardedOptimizer can't take, refused before anything has changed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable

import torch
from torch import nn

from ds_zero.covered import is_sharded
from ds_zero.errors import ZeroError
from ds_zero.state_access import is_held


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that can't work on shards.

    Raises:
        ValueError: it wants sparse gradients, or a closure.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "gradients are reduced dense, and SparseAdam takes sparse ones only; use Adam or AdamW, which take the "
            "gradients of sparse embeddings too"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "a step can't run backward again, and LBFGS wants a closure that does; use it in a loop of your own, or "
            "another optimizer"
        )


def check_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that can't be sharded, or that another optimizer shards already.

    Raises:
        ZeroError: one is not a real number, shares memory with another, or is held by an optimizer that was not
            closed.
    """
    named = list(named)
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise ZeroError(
                f"real parameters are trained: {name!r} is {parameter.dtype}; keep its real and imaginary parts as a "
                "real parameter and use torch.view_as_complex() in the model, or freeze it"
            )
    _check_memory(named)
    if any(is_held(parameter) for _, parameter in named):
        gc.collect()  # one that was dropped without close() may linger in a cycle
    for name, parameter in named:
        if is_held(parameter):
            raise ZeroError(
                f"a parameter is trained by one optimizer at a time: {name!r} is held by another; call destroy() on "
                "its engine (close() on a ShardedOptimizer) first"
            )


def _check_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    placed = [(n, p) for n, p in named if p.is_contiguous() and not is_sharded(p)]
    whole = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n) for n, p in placed]
    whole = sorted(each for each in whole if each[0] < each[1])
    for (_, stop, first), (start, _, second) in itertools.pairwise(whole):
        if start < stop:
            raise ZeroError(
                f"each parameter gets storage of its own: {first!r} and {second!r} share memory and would part; make "
                "them one nn.Parameter, which both modules hold"
            )
