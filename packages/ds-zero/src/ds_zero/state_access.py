"""Looking at and changing sharded states, parameter by parameter. For debugging, not for speed.

The full forms are collective where they read: every rank calls them for the same parameters in the same
order. The local forms speak of this rank's piece alone.

Source: DeepSpeed API reference 5.1.5 and 5.1.6.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_zero.errors import ZeroError
from ds_zero.gathered import GatheredParameters
from ds_zero.group_storage import Piece
from ds_zero.shard_group import ShardGroup

if TYPE_CHECKING:
    from ds_zero.sharded_optimizer import ShardedOptimizer


@dataclass
class _Owner:
    optimizer: ShardedOptimizer
    group: ShardGroup
    slot: int

    @property
    def key(self) -> tuple[int, int]:
        """Group and slot, as the reducer counts."""
        return self.group.layout.index, self.slot

    @property
    def pieces(self) -> list[Piece]:
        """This rank's piece of the parameter: one, or none."""
        return [piece for piece in self.group.pieces if piece.slot == self.slot]


# The one place where a parameter leads to what holds its states; the documented calls get nothing else.
# Optimizer (weak: one that is dropped without close() must not live on with the model), group, slot.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register_owner(parameter: nn.Parameter, optimizer: ShardedOptimizer, group: int, slot: int) -> None:
    """Notes who holds a parameter's states."""
    _owners[parameter] = (weakref.ref(optimizer), group, slot)


def is_held(parameter: nn.Parameter) -> bool:
    """An optimizer that lives holds its states."""
    return _owner(parameter) is not None


def _owner(parameter: nn.Parameter) -> _Owner | None:
    reference, group, slot = _owners.get(parameter, (None, 0, 0))
    optimizer = reference() if reference is not None else None
    return None if optimizer is None else _Owner(optimizer, optimizer.groups[group], slot)


def release_owner(parameter: nn.Parameter) -> None:
    """Forgets it."""
    _owners.pop(parameter, None)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The fp32 value of a parameter: its master where it has one. Collective.

    Returns:
        A copy, fp32, of the parameter's shape; a frozen parameter's own value.
    """
    owner = _owner(param)
    if owner is None:
        with GatheredParameters(param):
            return param.detach().float().clone()
    owner.group.reclaim()
    return _assemble(owner, param, lambda piece: piece.tensor)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient averaged over ranks and micro-batches, without loss scale. Valid until `step`. Collective.

    Returns:
        A copy, fp32, of the parameter's shape; None where no rank has a gradient for it.
    """
    owner = _owner(param)
    if owner is None:
        return param.grad
    group, comm = owner.group, owner.optimizer.comm
    owner.optimizer.reducer.collect_strays()
    group.finish_reduction()
    full = torch.zeros(param.numel() + 1, device=param.device)
    full[-1] = float(owner.key in owner.optimizer.reducer.used)
    if group.reduced is not None and (group.layout.splits is not None or comm.rank == 0):
        for piece in owner.pieces:
            full[piece.spec.start : piece.spec.stop] = group.reduced[piece.start : piece.start + piece.spec.numel]
    if (unsent := group.local(owner.slot)) is not None:
        full[:-1] += unsent * owner.optimizer.pre_scale
    comm.all_reduce(full)
    return full[:-1].view(param.shape) * owner.optimizer.scale if full[-1] > 0 else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A state of the optimizer, as `exp_avg`. Collective.

    Returns:
        A copy, fp32, of the parameter's shape; None for a parameter that is not trained.

    Raises:
        ZeroError: the optimizer keeps no such state, or not yet (states come with the first step).
    """
    owner = _owner(param)
    if owner is None:
        return None
    return _assemble(owner, param, lambda piece: _state(owner, piece, optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets a parameter and its master. Every rank passes the same value, of the parameter's shape."""
    _check(param, value)
    with torch.no_grad():
        owner = _owner(param)
        if owner is None or not owner.group.sharded:
            if owner is not None:
                owner.group.reclaim()
            with GatheredParameters(param, modifier_rank=0):
                param.copy_(value)
        if owner is None:
            return
        for piece in owner.pieces:
            piece.tensor.copy_(piece.spec.of(value).view(piece.tensor.shape))
            owner.group.shard[piece.start : piece.start + piece.spec.numel].copy_(piece.tensor.reshape(-1))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets a state of the optimizer. Every rank passes the same value, of the parameter's shape."""
    _check(param, value)
    owner = _require(param)
    for piece in owner.pieces:
        state = _state(owner, piece, optim_state_key)
        state.copy_(piece.spec.of(value).view(state.shape))


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the averaged, unscaled gradient after it was reduced. Every rank passes the same value. Collective.

    Raises:
        ZeroError: no reduced gradient is there (call it between the boundary's backward and `step`).
    """
    _check(param, value)
    owner = _require(param)
    owner.group.finish_reduction()
    reducer = owner.optimizer.reducer
    if owner.group.reduced is None and not reducer.is_alone:  # it holds gradients back until the step
        reducer.finish()
    if owner.group.reduced is None:
        raise ZeroError(
            "a gradient is set between backward and step, and none has been reduced yet; call backward first"
        )
    for piece in owner.pieces:
        target = owner.group.reduced[piece.start : piece.start + piece.spec.numel]
        target.copy_(piece.spec.of(value) / owner.optimizer.scale)
    reducer.used.add(owner.key)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of the fp32 value, flat; None where it holds none."""
    return _local(param, lambda owner, piece: piece.tensor.detach())


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of the averaged gradient, flat, in fp32; None where it holds none."""

    def read(owner: _Owner, piece: Piece) -> torch.Tensor | None:
        owner.group.finish_reduction()
        if owner.group.reduced is None:
            return None
        return owner.group.reduced[piece.start : piece.start + piece.spec.numel].float() * owner.optimizer.scale

    return _local(param, read)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's piece of an optimizer state, flat; None where it holds none."""
    return _local(param, lambda owner, piece: _state(owner, piece, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's piece of the fp32 value; other ranks see it after the next `step`."""
    owner = _require(param)
    owner.group.reclaim()
    for piece in owner.pieces:
        with torch.no_grad():
            piece.tensor.copy_(_fit(value, piece).view(piece.tensor.shape))
            owner.group.shard[piece.start : piece.start + piece.spec.numel].copy_(piece.tensor.reshape(-1))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's piece of an optimizer state."""
    owner = _require(param)
    for piece in owner.pieces:
        state = _state(owner, piece, optim_state_key)
        state.copy_(_fit(value, piece).view(state.shape))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets this rank's piece of the averaged gradient, once that is reduced.

    Raises:
        ZeroError: it is not. With several engines, `loss.backward()` leaves that to `step`; `engine.backward` doesn't.
    """
    owner = _require(param)
    owner.group.finish_reduction()
    for piece in owner.pieces:
        if owner.group.reduced is None:
            raise ZeroError(
                "a gradient is set between backward and step, and none has been reduced yet; call engine.backward(loss)"
            )
        target = owner.group.reduced[piece.start : piece.start + piece.spec.numel]
        target.copy_(_fit(value, piece) / owner.optimizer.scale)
        owner.optimizer.reducer.used.add(owner.key)


def _assemble(owner: _Owner, param: nn.Parameter, read: Callable[[Piece], torch.Tensor]) -> torch.Tensor:
    """All ranks' pieces together. Where one has none to give, every rank raises, and none is left waiting."""
    full = torch.zeros(param.numel() + 1, device=param.device)  # the last counts the ranks that have nothing
    missing: ZeroError | None = None
    for piece in owner.pieces:
        try:
            full[piece.spec.start : piece.spec.stop] = read(piece).detach().reshape(-1)
        except ZeroError as error:
            full[-1], missing = 1.0, error
    if owner.group.layout.splits is not None:  # else every rank holds it all
        owner.optimizer.comm.all_reduce(full)
    if missing is not None:
        raise missing
    if full[-1] > 0:
        name = owner.group.layout.slots[owner.slot].info.name
        raise ZeroError(
            f"the rank that holds {name!r} was asked for a state that it does not keep, and says which it has; "
            "states come with the first step()"
        )
    return full[:-1].view(param.shape)


def _local(param: nn.Parameter, read: Callable[[_Owner, Piece], torch.Tensor | None]) -> torch.Tensor | None:
    owner = _owner(param)
    if owner is None or not owner.pieces:
        return None
    found = read(owner, owner.pieces[0])
    return None if found is None else found.reshape(-1)


def _state(owner: _Owner, piece: Piece, key: str) -> torch.Tensor:
    states = owner.optimizer.inner.state.get(piece.tensor, {})
    value = states.get(key)
    if not isinstance(value, torch.Tensor) or value.numel() != piece.spec.numel:
        kept = sorted(k for k, v in states.items() if isinstance(v, torch.Tensor) and v.numel() == piece.spec.numel)
        raise ZeroError(
            f"the optimizer keeps what it was asked for: {piece.spec.name!r} has no state {key!r}; "
            + (f"it has {kept}" if kept else "states come with the first step(): take one first")
        )
    return value


def _require(param: nn.Parameter) -> _Owner:
    owner = _owner(param)
    if owner is None:
        raise ZeroError(
            f"only a trained parameter has states: one of shape {tuple(param.shape)} is not held by any engine; "
            "pass a parameter that was given to initialize()"
        )
    return owner


def _check(param: nn.Parameter, value: torch.Tensor) -> None:
    if value.shape != param.shape:
        raise ValueError(
            f"a full value has the parameter's shape: {tuple(param.shape)}, got {tuple(value.shape)}; "
            "pass the whole tensor (the local form takes this rank's piece)"
        )


def _fit(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    if value.numel() != piece.spec.numel:
        raise ValueError(
            f"a local value has the size of this rank's piece: {piece.spec.numel} elements of "
            f"{piece.spec.name!r}, got {value.numel()}; read it with the get form first"
        )
    return value.reshape(-1)
