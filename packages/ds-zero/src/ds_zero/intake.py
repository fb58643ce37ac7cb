"""Intake: how parameters get from an optimizer's lists into shard groups, at first and when they thaw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_comm import Communicator
from ds_zero.admission import check_parameters
from ds_zero.agreement import agree_on_parameters
from ds_zero.buffers import BufferPool
from ds_zero.fetcher import Fetcher
from ds_zero.group_storage import Piece
from ds_zero.layout import Cut, GroupLayout, ParameterInfo, plan_groups
from ds_zero.reducer import Reducer
from ds_zero.shard_group import ReductionOptions, ShardGroup

Listed = tuple[int, nn.Parameter]
"""A parameter, and the number of the optimizer's parameter group that lists it."""


@dataclass(frozen=True)
class Terms:
    """How parameters are laid out.

    Args:
        cut: where shards of trained parameters may cut.
        most: most elements of a group.
        parameter_dtype: dtype that trained parameters get; None leaves them.
        master_dtype: dtype of masters beside parameters of low precision; None for none.
        reduction: how gradients are reduced.
    """

    cut: Cut
    most: int
    parameter_dtype: torch.dtype | None
    master_dtype: torch.dtype | None
    reduction: ReductionOptions


class Intake:
    """Lays parameters out when they require a gradient, and hands this rank's pieces to the optimizer.

    Args:
        optimizer: its lists and states are taken over.
        names: of the model's parameters, by identity, in the model's order.
        comm: the ranks.
        terms: how.
        reducer: gets the groups that are trained.
        fetcher: gathers sharded parameters; None where they are not sharded.
        model: all parameters by name, which a fetcher shards, the frozen ones too.
        register: told a trained parameter, its group's number and its slot.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        comm: Communicator,
        terms: Terms,
        reducer: Reducer,
        fetcher: Fetcher | None,
        model: dict[str, nn.Parameter],
        register: Callable[[nn.Parameter, int, int], None],
    ):
        self._optimizer, self._names, self._comm, self._terms = optimizer, names, comm, terms
        self._reducer, self._fetcher, self._model, self._register = reducer, fetcher, model, register
        self.pool = BufferPool()
        self.frozen: list[ShardGroup] = []
        """Groups of what is sharded and not trained."""
        self._waiting: list[Listed] = []  # frozen so far
        self._past: dict[torch.Tensor, Any] = {}  # states that the optimizer had for them

    def take_over(self) -> None:
        """Takes the optimizer's parameters and states, and those that are ready in.

        Raises:
            ValueError: none requires a gradient.
            ZeroError: see `check_parameters` and `agree_on_parameters`.
        """
        listed = [(i, p) for i, g in enumerate(self._optimizer.param_groups) for p in g["params"]]
        if not any(p.requires_grad for _, p in listed):
            raise ValueError(
                f"there is something to train: the optimizer lists {len(listed)} parameters and none requires "
                "a gradient; pass model.parameters() as model_parameters, or unfreeze some"
            )
        self.check(listed)
        for param_group in self._optimizer.param_groups:
            param_group["params"] = []
        self._past = dict(self._optimizer.state)
        self._optimizer.state.clear()
        self.add(listed)

    def check(self, listed: list[Listed]) -> None:
        """Raises a ZeroError where one of them can't be trained."""
        check_parameters((self._names.get(id(p), "a parameter"), p) for _, p in listed if p.requires_grad)

    def add(self, listed: list[Listed]) -> None:
        """More parameters, checked, of which those that are ready are taken in. Collective."""
        self._waiting += listed
        self.admit()

    def admit(self) -> None:
        """Takes in those that wait and require a gradient; where parameters are sharded, at first the whole model."""
        ready = [(i, p) for i, p in self._waiting if p.requires_grad]
        if not ready:
            return
        self._waiting = [(i, p) for i, p in self._waiting if not p.requires_grad]
        frozen: list[nn.Parameter] = []
        if self._fetcher is not None:
            thawed = {id(p) for _, p in ready}
            if not self._reducer.groups:
                frozen = [p for p in self._model.values() if id(p) not in thawed]
            for group in [g for g in self.frozen if any(id(p) in thawed for p in g.parameters)]:
                group.release()
                self.frozen.remove(group)
                frozen += [p for p in group.parameters if id(p) not in thawed]
        self.check(ready)
        self._adopt(ready, frozen)

    def close(self) -> None:
        """Lets go of everything."""
        self.frozen, self._waiting, self._model, self._past = [], [], {}, {}
        self.pool.clear()

    def _adopt(self, trained: list[Listed], frozen: list[nn.Parameter]) -> None:
        reducer, terms, device = self._reducer, self._terms, trained[0][1].device
        infos, by_name = self._describe(trained, frozen)
        agree_on_parameters(infos, self._comm, device)
        to_train = [info for info in infos if info.trained]
        for layout in plan_groups(to_train, self._comm.world, terms.most, terms.cut, len(reducer.groups)):
            group = self._lay_out(layout, by_name)
            reducer.add(group)
            for slot, parameter in enumerate(group.parameters):
                self._register(parameter, layout.index, slot)
            for piece in group.pieces:
                number = layout.slots[piece.slot].info.param_group
                self._optimizer.param_groups[number]["params"].append(piece.tensor)
                if state := self._past.get(group.parameters[piece.slot]):
                    self._optimizer.state[piece.tensor] = {k: _cut_state(v, piece) for k, v in state.items()}
        to_keep = [info for info in infos if not info.trained]
        for layout in plan_groups(to_keep, self._comm.world, terms.most, Cut.ANYWHERE):
            self.frozen.append(self._lay_out(layout, by_name))
        for _, parameter in trained:
            self._past.pop(parameter, None)
        if self._fetcher is not None:
            groups = [*reducer.groups, *self.frozen]
            self._fetcher.assign(groups, {slot.info.name: g for g in groups for slot in g.layout.slots})

    def _describe(
        self, trained: list[Listed], frozen: list[nn.Parameter]
    ) -> tuple[list[ParameterInfo], dict[str, nn.Parameter]]:
        """What the plan needs to know, in the model's order, and the parameters by name."""
        infos, by_name = [], {}
        units = self._fetcher.plan.unit_of() if self._fetcher is not None else {}
        order = {identity: position for position, identity in enumerate(self._names)}
        listed = [(i, p, True) for i, p in trained] + [(-1, p, False) for p in frozen]
        listed.sort(key=lambda each: order.get(id(each[1]), len(order)))
        for index, (param_group, parameter, trains) in enumerate(listed):
            name = self._names.get(id(parameter), f"parameter.{len(self._reducer.groups)}.{index}")
            by_name[name] = parameter
            dtype = (self._terms.parameter_dtype if trains else None) or parameter.dtype
            unit = units.get(name, 0)
            infos.append(ParameterInfo(name, tuple(parameter.shape), dtype, param_group, unit, trains))
        return infos, by_name

    def _lay_out(self, layout: GroupLayout, by_name: dict[str, nn.Parameter]) -> ShardGroup:
        low = layout.trained and layout.dtype in (torch.bfloat16, torch.float16)
        return ShardGroup(
            layout,
            [by_name[slot.info.name] for slot in layout.slots],
            self._comm,
            self.pool,
            self._terms.reduction,
            self._terms.master_dtype if low else None,
            sharded=self._fetcher is not None and not self._fetcher.plan.units[layout.unit].persistent,
        )


def _cut_state(value: Any, piece: Piece) -> Any:
    """The part of a client optimizer's existing state that goes with `piece`."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.spec.shape and value.dim() > 0:
        return piece.spec.of(value).to(piece.tensor.dtype, copy=True).view(piece.tensor.shape)
    return value
