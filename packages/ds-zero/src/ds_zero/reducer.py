"""Reducer: takes gradients as backward makes them, and reduces groups in one order on every rank.

A *round* is one backward pass: it opens with the first gradient and closes when backward ends. Group k is
sent once all its gradients are there and group k-1 was sent; what is left is sent when the round closes. So
the order is the groups' order on every rank, whatever order gradients arrive in, and a rank that did not use
a parameter sends zeros for it.

Note [A parameter that comes twice]: reentrant activation checkpointing runs backward inside backward, and a
tied weight then gets its gradient in portions. A portion that comes after its group was sent needs a second
sending. In the first round that reduces, ranks agree at its end on which groups that happened to; those are
sent at the end of the round from then on. A later surprise is an error that names the parameter: sending
again without agreement would leave the other ranks waiting.

Note [Backward inside backward]: autograd calls back at the end of the innermost backward that runs. A round
that a nested one opened would close with it, and ranks with another number of nested ones would lose step.
So `watch` listens at the model's outputs, which the outermost backward reaches before anything nests in it.

Note [Several engines]: a loss may pass through several engines, and through other parameters of each on another
rank; no order of arrival, and no end of a backward, is then the same everywhere. So beside other reducers on one
communicator, a reducer sends while it runs backward only where it was told that the backward is its own (`round`);
what another's or a plain backward leaves with it waits for `finish`, which every rank calls in its program's order.
A gradient that nobody asks for, as a discriminator's from its generator's loss, is so never sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_comm import Communicator
from ds_zero.errors import ZeroError
from ds_zero.shard_group import ShardGroup


class _Line:
    """What the reducers on one communicator share."""

    def __init__(self) -> None:
        self.num_reducers = 0  # not closed; one that was only dropped counts, as ranks drop it at different times
        self.num_sent = 0  # groups, of all of them


_lines: weakref.WeakKeyDictionary[Communicator, _Line] = weakref.WeakKeyDictionary()


class _Running:
    """Lives as long as the backward it was queued on: autograd drops it at the end, and when one breaks off."""


class Reducer:
    """Hooks on the parameters of `groups`, and the order of their reductions.

    Args:
        comm: the data-parallel ranks.
        overlap: go on with backward while a reduction runs.
        wants_reduction: asked when a round opens: does this backward reduce, or only collect?
        factor: what gradients are multiplied by as they are taken: of the running backward (True), or written
            into `.grad` by hand (False).
        notify: told when a backward that nobody announced (by `round`) is first seen here (True) and has ended
            (False).
    """

    def __init__(
        self,
        comm: Communicator,
        overlap: bool,
        wants_reduction: Callable[[], bool],
        factor: Callable[[bool], float],
        notify: Callable[[bool], None] = lambda running: None,
    ):
        self._comm, self._overlap = comm, overlap
        self._wants_reduction, self._ask_factor, self._notify = wants_reduction, factor, notify
        self.groups: list[ShardGroup] = []
        self.used: set[tuple[int, int]] = set()
        """Group and slot of every parameter that got a gradient here since `clear`."""
        self.num_reductions = 0
        """Rounds that reduced since `clear`."""
        self.on_broken: Callable[[], None] = lambda: None
        """Called when the gradients of a backward that broke off are forgotten, with all that came before it."""
        self.order = 0
        """A fingerprint of when groups were sent since `clear`, among all that was sent on `comm`."""
        self._line = _lines.setdefault(comm, _Line())
        self._held = False  # whoever runs backward closes the round; else autograd's end does
        self._running: Callable[[], _Running | None] = lambda: None  # the backward whose end closes the round
        self._factor = 1.0
        self._open = self._reducing = False
        self._missing: list[int] = []  # by group: gradients that have not come in this round
        self._seen: set[tuple[int, int]] = set()  # gradients that have
        self._next = 0  # the group to send next
        self._agreed = False  # see Note [A parameter that comes twice]
        self._again: set[int] = set()
        self._late: set[int] = set()
        self._hooks: list[Any] = []
        self.most_in_flight: int | None = None
        """Groups that may be on their way at a time, where whole gradients are not to pile up; None is no limit."""
        self._in_flight: deque[ShardGroup] = deque()
        self.paced = False
        """Groups are complete when `complete` says so, not when their last gradient has come."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a backward has ended, also where it was only collected."""

    def add(self, group: ShardGroup) -> None:
        """Takes over a group's gradients. The same groups in the same order on every rank."""
        me = weakref.ref(self)
        number = len(self.groups)
        self._line.num_reducers += number == 0
        self.groups.append(group)
        for slot, parameter in enumerate(group.parameters):

            def hook(parameter: nn.Parameter, number: int = number, slot: int = slot) -> None:
                reducer = me()
                if reducer is not None:
                    reducer._take(number, slot, parameter)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _take(self, number: int, slot: int, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if not self._held:
            self.drop_stale()
            self._follow()
        if not self._open:
            self._begin()
        if self._factor != 1.0:
            gradient = gradient * self._factor
        self.used.add((number, slot))
        group = self.groups[number]
        if self._reducing and number < self._next:
            self._surprise(number, slot)
            group.accumulate(slot, gradient)
            return
        group.accumulate(slot, gradient)
        if (number, slot) not in self._seen:
            self._seen.add((number, slot))
            if not self.paced:
                self._missing[number] -= 1
            if self._reducing:
                self._send_ready()

    def complete(self, group: ShardGroup) -> None:
        """No gradient of the group is to come in this backward; for `paced` groups."""
        if not self._held:
            self.drop_stale()
            self._follow()
        if not self._open:
            self._begin()
        self._missing[self.groups.index(group)] = 0
        if self._reducing:
            self._send_ready()

    def watch(self, outputs: Any) -> None:
        """Marks what the model gave out; see Note [Backward inside backward]."""
        if self._comm.world == 1:
            return
        me = weakref.ref(self)

        def arrive(gradient: torch.Tensor) -> None:
            if (reducer := me()) is not None and not reducer._held:
                reducer._follow()

        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad and not output.is_leaf:
                output.register_hook(arrive)

    def _follow(self) -> None:
        """The backward that runs now closes the round at its end, unless one that it runs in does."""
        if self._running() is None:
            running = _Running()
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, running))
            self._notify(True)

    def _end(self, running: _Running) -> None:
        self._running = lambda: None
        self.close_round()
        self.on_end()
        self._notify(False)

    @property
    def is_alone(self) -> bool:
        """No other reducer sends on this communicator: see Note [Several engines]."""
        return self._comm.world == 1 or self._line.num_reducers == 1

    def _begin(self) -> None:
        self._factor = self._ask_factor(True)
        self._open, self._next = True, 0
        self._reducing = (self._held or self.is_alone) and self._wants_reduction()
        self._missing = [sum(p.requires_grad for p in group.parameters) + self.paced for group in self.groups]
        self._seen = set()
        self._again = set()

    def _send_ready(self) -> None:
        while self._next < len(self.groups) and self._missing[self._next] == 0 and self._next not in self._late:
            self._send(self._next)
            self._next += 1

    def _send(self, number: int) -> None:
        self.order = (self.order * 31 + self._line.num_sent) % 65521
        self._line.num_sent += 1
        group = self.groups[number]
        group.start_reduction(async_op=self._overlap)
        if self._overlap and self.most_in_flight is not None:
            self._in_flight.append(group)
            while len(self._in_flight) > self.most_in_flight:
                self._in_flight.popleft().finish_reduction()

    def _surprise(self, number: int, slot: int) -> None:
        if self._agreed:
            name = self.groups[number].layout.slots[slot].info.name
            raise ZeroError(
                f"a parameter's gradient is complete when its group is reduced: {name!r} on rank "
                f"{self._comm.rank} got another portion after that, and had not in the first step; use "
                "torch.utils.checkpoint with use_reentrant=False, or set reduce_bucket_size so that "
                "everything is reduced at the end"
            )
        self._again.add(number)

    @contextmanager
    def round(self) -> Iterator[None]:
        """A backward runs inside; the round closes with the block, though backward nests in itself.

        Where it fails, its gradients are forgotten.
        """
        self.drop_stale()
        if self._ask_factor(False) != 1.0:  # autograd would add to what was written by hand, at another scale
            self.collect_strays()
        self._held = True
        try:
            try:
                yield
            except BaseException:
                self.clear()
                raise
            if not self._open:  # no gradient came; the other ranks may have some
                self._begin()
            self.close_round()
        finally:
            self._held = False
            self.on_end()

    def close_round(self) -> None:
        """Ends the round: sends what is left, in order. Without a round, nothing."""
        if not self._open:
            return
        self._open = False
        if not self._reducing:
            return
        self.num_reductions += 1
        early = self._next
        for number in range(early, len(self.groups)):
            self._send(number)
        self._next = 0
        if not self._agreed:
            self._agree()

    def _agree(self) -> None:
        self._agreed = True
        flags = self._anywhere([number in self._again for number in range(len(self.groups))])
        late = [number for number, flag in enumerate(flags) if flag]
        for number in late:
            self._send(number)
        self._late.update(late)

    def finish(self) -> None:
        """Everything collected since `clear` is reduced and has arrived, on every rank. Collective."""
        self.collect_strays()
        self.close_round()
        if self.num_reductions == 0:
            self._send_all()
            if self.is_alone and not self._agreed:  # as the ranks do that reduced in a round
                self._agree()
        if self._have_local():
            self._send_all()
        for group in self.groups:
            group.finish_reduction()

    def _send_all(self) -> None:
        self.num_reductions += 1
        for number in range(len(self.groups)):
            self._send(number)

    def _have_local(self) -> bool:
        """Gradients came after the last sending. Alone, ranks have them alike; beside others, any rank may."""
        here = any(group.has_local for group in self.groups)
        return here if self.is_alone else self._anywhere([here])[0]

    def _anywhere(self, flags: list[bool]) -> list[bool]:
        """Which flags are set on any rank. Collective."""
        if self._comm.world == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.float32).to(self.groups[0].device)
        self._comm.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def collect_strays(self) -> None:
        """Takes gradients that someone put into `.grad` by hand."""
        for number, group in enumerate(self.groups):
            for slot, parameter in enumerate(group.parameters):
                if parameter.grad is not None:
                    gradient, parameter.grad = parameter.grad * self._ask_factor(False), None
                    self.used.add((number, slot))
                    group.accumulate(slot, gradient)

    @property
    def is_stale(self) -> bool:
        """A round is open though its backward has ended: it was broken off by an exception."""
        return self._open and not self._held and self._running() is None

    def drop_stale(self) -> None:
        """Forgets all gradients if a backward was broken off."""
        if self.is_stale:
            self.clear()
            self.on_end()
            self.on_broken()

    def clear(self) -> None:
        """Forgets all gradients; the next ones start afresh."""
        self._open = False
        self._in_flight.clear()
        for group in self.groups:
            group.drop_gradients()
        self.used.clear()
        self.num_reductions = self.order = 0

    def close(self) -> None:
        """Takes the hooks off."""
        if self._hooks:
            self._line.num_reducers -= 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
