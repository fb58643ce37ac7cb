"""The 1Cycle policy: the learning rate rises and falls once, the momentum the other way, then both decay."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ds_engine.lr_schedules.schedule import HasParamGroups, PerGroup, Schedule, number, whole, write

logger = logging.getLogger(__name__)

MOMENTUM_CEILING = 0.999
"""Where the decay phase stops raising the momentum, unless `cycle_max_mom` is higher (1 would diverge)."""


class OneCycle(Schedule):
    """One cycle of the learning rate (and, inversely, of the momentum), followed by a decay.

    With n = iteration + 1 batches done, the height h of the cycle goes from 0 to 1 over `first` batches and
    back to 0 over `second`:

        h = n / first                        n <= first
        h = (first + second - n) / second    first < n <= first + second
        h = floor(h * stairs) / stairs       where that half has stairs
        lr = min_lr + h * (max_lr - min_lr)
        momentum = max_mom - h * (max_mom - min_mom)

    and after the cycle, with d = (n - first - second) / decay_step_size (d = 0 where that is 0),

        lr = min_lr / (1 + decay_lr_rate * d)
        momentum = max_mom * (1 + decay_mom_rate * d)

    The momentum of a group is `betas[0]`, or `momentum` where that is not 0 (momentum switched off stays
    off). As documented, it starts at `cycle_min_mom`: that value holds before the first `step()` only.

    From "A disciplined approach to neural network hyper-parameters: Part 1" (Smith, 2018, arXiv:1803.09820).

    Differs from DeepSpeed 0.19 in two points. That cycles `betas` only and leaves the momentum of SGD alone;
    the documentation says momentum is cycled. Its momentum decay leaves the interval from 0 to 1, where
    training diverges; ours stays in it, below `MOMENTUM_CEILING`.

    Args:
        optimizer: whose parameter groups' `lr` and momentum are written.
        cycle_min_lr: learning rate at both ends of the cycle; a number, or a list with one for each group.
        cycle_max_lr: learning rate at the top; a number, or a list with one for each group.
        decay_lr_rate: how fast the learning rate decays after the cycle. Default 0.0: not at all.
        cycle_first_step_size: batches in the rising half, at least 1. Default 2000.
        cycle_second_step_size: batches in the falling half. Default None: as many as in the first.
        cycle_first_stair_count: stairs in the rising half. Default 0: no stairs, a straight line.
        cycle_second_stair_count: stairs in the falling half. Default None: as many as in the first.
        decay_step_size: batches in one interval of the decay. Default 0: no decay, whatever the rates.
        cycle_momentum: cycle the momentum too. Default True.
        cycle_min_mom: momentum at the top; a number, or a list with one for each group. Default 0.8.
        cycle_max_mom: momentum at both ends; a number, or a list with one for each group. Default 0.9.
        decay_mom_rate: how fast the momentum grows (below 0: falls) after the cycle. Default 0.0: not at all.
        last_batch_iteration: index of the last batch done; -1 starts from the beginning. Default -1.

    Raises:
        ValueError: a value of the wrong kind, or a list that does not have one value a group.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.min_lr, self.max_lr = cycle_min_lr, cycle_max_lr
        self.min_mom, self.max_mom = cycle_min_mom, cycle_max_mom
        self.decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        if self.decay_lr_rate < 0:
            raise ValueError(
                f"decay_lr_rate is at least 0, got {decay_lr_rate!r}: give 0 for no decay, more for a decay"
            )
        self.decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        give = "give the batches in that half of the cycle"
        self.first_step_size = whole("cycle_first_step_size", cycle_first_step_size, 1, give)
        if cycle_second_step_size is None:
            cycle_second_step_size = self.first_step_size
        self.second_step_size = whole("cycle_second_step_size", cycle_second_step_size, 0, give)
        stairs = "give the number of stairs, 0 for none"
        self.first_stair_count = whole("cycle_first_stair_count", cycle_first_stair_count, 0, stairs)
        if cycle_second_stair_count is None:
            cycle_second_stair_count = self.first_stair_count
        self.second_stair_count = whole("cycle_second_stair_count", cycle_second_stair_count, 0, stairs)
        self.decay_step_size = whole(
            "decay_step_size", decay_step_size, 0, "give the batches between two decays, 0 for no decay"
        )
        self.cycle_momentum = bool(cycle_momentum)
        self._cycled: list[bool] = []  # for each parameter group: whether its momentum is ours to write
        self._move_to(last_batch_iteration)
        if self.cycle_momentum and not any(self._cycled):
            self.cycle_momentum = False
            logger.warning(
                "OneCycle cycles the learning rate only: %s has no momentum (neither betas nor a momentum "
                "other than 0); set cycle_momentum to false to say so",
                type(optimizer).__name__,
            )

    def lr_at(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at `iteration` (-1: before the first update)."""
        lows, highs = self._each("cycle_min_lr", self.min_lr), self._each("cycle_max_lr", self.max_lr)
        if (intervals := self._decay_intervals(iteration)) is not None:
            return [low / (1 + self.decay_lr_rate * intervals) for low in lows]
        height = self._height(iteration)
        return [low + (high - low) * height for low, high in zip(lows, highs)]

    def momentum_at(self, iteration: int) -> list[float]:
        """The momentum of each parameter group at `iteration` (-1: before the first update)."""
        lows, highs = self._each("cycle_min_mom", self.min_mom), self._each("cycle_max_mom", self.max_mom)
        if iteration < 0:
            return lows
        if (intervals := self._decay_intervals(iteration)) is not None:
            growth = 1 + self.decay_mom_rate * intervals
            return [max(0.0, min(high * growth, max(high, MOMENTUM_CEILING))) for high in highs]
        height = self._height(iteration)
        return [high - (high - low) * height for low, high in zip(lows, highs)]

    def get_mom(self) -> list[float] | None:
        """The momentum of each parameter group at the present iteration; None where it is not cycled."""
        return self.momentum_at(self.last_batch_iteration) if self.cycle_momentum else None

    def _move_to(self, iteration: int) -> None:
        super()._move_to(iteration)
        if not self.cycle_momentum:
            return
        groups = self.optimizer.param_groups
        # Asked once a group: a cycle whose lowest momentum is 0 must be able to leave it.
        self._cycled += ["betas" in group or bool(group.get("momentum")) for group in groups[len(self._cycled) :]]
        for group, momentum, cycled in zip(groups, self.momentum_at(iteration), self._cycled):
            if cycled:
                _write_momentum(group, momentum)

    def _decay_intervals(self, iteration: int) -> float | None:
        """Intervals of the decay phase that have passed; None during the cycle."""
        num_batches = iteration + 1 - self.first_step_size - self.second_step_size
        if num_batches <= 0:
            return None
        return num_batches / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, iteration: int) -> float:
        """How high the cycle stands, 0 to 1."""
        num_batches = iteration + 1
        size, stairs = self.first_step_size, self.first_stair_count
        # With an empty second half the cycle is over as soon as the top is reached.
        if num_batches > size or (num_batches == size and not self.second_step_size):
            num_batches = size + self.second_step_size - num_batches
            size, stairs = self.second_step_size or 1, self.second_stair_count
        return num_batches * stairs // size / stairs if stairs else num_batches / size


def _write_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" not in group:
        write(group, "momentum", momentum)
        return
    first, *rest = group["betas"]
    if isinstance(first, torch.Tensor):  # a captured graph reads it
        first.fill_(momentum)
    else:
        group["betas"] = (momentum, *rest)
