"""Fetcher: gathers a unit's parameters before its forward and its backward, and frees them after.

Forward is bracketed by module hooks. Backward of a unit begins when a gradient of its outputs is there, and ends
when those of its inputs are: then its own gradients are complete and are sent. A unit without inputs that need a
gradient ends with the backward.

Note [Same collectives on every rank]: gathers and reductions go one way through one communicator, so their order
must not depend on what a rank's gradients do. It follows units only: a unit is entered and left alike on all
ranks, while a parameter in it may be unused on some.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_comm import CommError
from ds_zero.config import ZeroConfig
from ds_zero.errors import ZeroError
from ds_zero.fetch_plan import FetchPlan, Unit
from ds_zero.group_storage import GroupStorage, refuse
from ds_zero.shard_group import ShardGroup


@dataclass
class _Running:
    """A unit as it runs."""

    unit: Unit
    own: list[ShardGroup] = field(default_factory=list)
    shared: list[GroupStorage] = field(default_factory=list)
    external: list[GroupStorage] = field(default_factory=list)
    """Others' groups that were used in its forward: gathered with it from then on."""
    entered: list[list[GroupStorage]] = field(default_factory=list)
    """By call of forward under way: what it holds."""
    kept: list[GroupStorage] = field(default_factory=list)
    """What its backward holds."""
    pending: int = 0
    """Forwards whose backward is to come."""
    open_ended: bool = False
    """No input of one of them needs a gradient: its backward ends when the whole does."""

    @property
    def needed(self) -> list[GroupStorage]:
        return [group for group in (*self.own, *self.shared, *self.external) if group.sharded]


class _Arrivals:
    """Counts gradients of a call's inputs, backward by backward."""

    def __init__(self, count: int):
        self._count, self._seen, self._backward = count, 0, -1

    def last(self) -> bool:
        """One more is there; is it the last?"""
        if self._backward != torch._C._current_graph_task_id():
            self._backward, self._seen = torch._C._current_graph_task_id(), 0
        self._seen += 1
        return self._seen == self._count


class Fetcher:
    """Runs a fetch plan.

    Args:
        model: the model that was planned.
        plan: its units.
        config: how much stays gathered between forward and backward.
        complete: called with a group when all its gradients of a backward are there.
    """

    def __init__(self, model: nn.Module, plan: FetchPlan, config: ZeroConfig, complete: Callable[[ShardGroup], None]):
        self.plan, self._config, self._complete = plan, config, complete
        self._units = [_Running(unit) for unit in plan.units]
        self._stack: list[_Running] = []  # units whose forward runs, the innermost last
        self._loose: list[GroupStorage] = []  # gathered for backward by a use that no unit foresaw
        self._twice = False  # the backward under way makes a graph (create_graph), which needs the values again
        self._trace: list[int] = []  # units in the order of the forward under way
        self._order: list[int] = []  # and of the last whole one
        self._groups: list[ShardGroup] = []
        self._hooks: list[Any] = []
        modules = dict(model.named_modules())
        compiled = any(module._compiled_call_impl is not None for module in model.modules())
        for running in self._units:
            self._watch(modules[running.unit.module], running, compiled)

    def assign(self, groups: Iterable[ShardGroup], by_name: dict[str, ShardGroup]) -> None:
        """Says which groups hold the units' parameters.

        Args:
            groups: all of them.
            by_name: the group of each parameter.
        """
        self._groups = list(groups)
        for running in self._units:
            running.own = [group for group in self._groups if group.layout.unit == running.unit.index]
            shared = dict.fromkeys(by_name[name] for name in running.unit.shared if name in by_name)
            running.shared = [group for group in shared if group not in running.own]
            running.external = []
        for group in self._groups:
            group.on_touch, group.on_graph = _weakly(self, Fetcher._touch), _weakly(self, Fetcher._keep)

    def _watch(self, module: nn.Module, running: _Running, compiled: bool) -> None:
        me = weakref.ref(self)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (fetcher := me()) is not None:
                fetcher._enter(running, (args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if (fetcher := me()) is not None:
                fetcher._leave(running, outputs)

        if compiled:  # a gather is nothing to trace
            before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    # Forward

    def _enter(self, running: _Running, inputs: Any) -> None:
        held = running.needed
        self._gather(held, running, "forward")
        self._stack.append(running)
        running.entered.append(held)
        if torch.is_grad_enabled() and not (_in_backward() and running.pending):
            self._expect_end(running, inputs)
            if running.unit.module:
                self._trace.append(running.unit.index)

    def _leave(self, running: _Running, outputs: Any) -> None:
        if not running.entered:
            return
        self._stack.pop()
        held = running.entered.pop()
        returns = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
        if torch.is_grad_enabled() and returns:
            self._expect_begin(running, returns)
            if not running.kept and (_in_backward() or self._soon_again(running)):
                running.kept, held = held, []
        for group in held:
            group.drop()
        if not self._stack:
            if len(self._trace) >= len(self._order):
                self._order = self._trace
            self._trace = []

    def _soon_again(self, running: _Running) -> bool:
        """Backward needs the unit before much else was gathered."""
        index = running.unit.index
        if index not in self._order:
            return False
        later = self._order[self._order.index(index) + 1 :]
        distance = 2 * sum(self._units[each].unit.numel for each in later)
        live = sum(group.layout.numel for group in self._groups if group.gathered)
        return distance <= self._config.max_reuse_distance and live <= self._config.max_live_parameters

    def _touch(self, group: GroupStorage, parameter: nn.Parameter) -> None:
        """A sharded parameter is used: by the unit whose forward runs, or in backward."""
        if self._stack:
            running = self._stack[-1]
            group.hold()
            running.entered[-1].append(group)
            if group not in running.external:
                running.external.append(group)
        elif _in_backward():
            self._keep(group)
        else:
            refuse(group, parameter)

    def _keep(self, group: GroupStorage) -> None:
        """Until backward has ended."""
        group.hold()
        self._loose.append(group)

    # Backward

    def _expect_begin(self, running: _Running, outputs: list[torch.Tensor]) -> None:
        me = weakref.ref(self)

        def begin(gradient: torch.Tensor) -> None:
            if (fetcher := me()) is not None:
                fetcher._begin_backward(running)

        for output in outputs:
            if not output.is_leaf:
                output.register_hook(begin)

    def _begin_backward(self, running: _Running) -> None:
        self._twice |= torch.is_grad_enabled()
        if not running.kept:
            running.kept = running.needed
            self._gather(running.kept, running, "backward")

    def _gather(self, groups: list[GroupStorage], running: _Running, what: str) -> None:
        for group in groups:
            try:
                group.hold()
            except CommError as error:
                name = group.layout.slots[0].info.name
                raise ZeroError(
                    "all ranks run the same modules in the same order, for parameters are gathered by all: "
                    f"{name!r} was to be gathered for {what} of {running.unit.module or 'the model'!r} on rank "
                    f"{group.comm.rank}, when {error}; let every rank call it, or make a unit of a module that all "
                    "call: set_z3_leaf_modules, stage3_prefetch_bucket_size"
                ) from error

    def _expect_end(self, running: _Running, inputs: Any) -> None:
        running.pending += 1
        # Of a leaf nobody says when its gradient is complete.
        needing = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        if not needing:
            running.open_ended = True
            return
        me = weakref.ref(self)
        arrivals = _Arrivals(len(set(map(id, needing))))

        # Not torch's register_multi_grad_hook: it holds the graph's nodes from their own hooks, for good.
        def arrive(gradient: torch.Tensor) -> None:
            if arrivals.last() and (fetcher := me()) is not None:
                fetcher._end_backward(running)

        for tensor in {id(t): t for t in needing}.values():
            tensor.register_hook(arrive)

    def _end_backward(self, running: _Running) -> None:
        running.pending -= 1
        if running.pending > 0 or running.open_ended or self._twice:
            return
        self._release(running)
        for group in running.own:
            if group.layout.trained:
                self._complete(group)

    def _release(self, running: _Running) -> None:
        kept, running.kept = running.kept, []
        for group in kept:
            group.drop()

    def end_backward(self) -> None:
        """Backward has ended: frees what is still held for it, unless its own graph is to be run backward."""
        for running in self._units:
            running.pending, running.open_ended = 0, False
        if self._twice:
            self._twice = False
            return
        for running in self._units:
            self._release(running)
        for group in self._loose:
            group.drop()
        self._loose = []

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._units, self._groups, self._stack, self._loose = [], [], [], [], []


def _weakly(fetcher: Fetcher, method: Callable[..., None]) -> Callable[..., None]:
    me = weakref.ref(fetcher)

    def call(*args: Any) -> None:
        if (alive := me()) is not None:
            method(alive, *args)

    return call


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
