"""Schedules that begin with a warm-up: constant, linear or cosine after it."""

from __future__ import annotations

import logging
import math

from ds_comm.names import did_you_mean
from ds_engine.lr_schedules.schedule import HasParamGroups, PerGroup, Schedule, whole

logger = logging.getLogger(__name__)

WARMUP_TYPES = ("log", "linear")


class _Warmup(Schedule):
    """The warm-up the three schedules share: the fraction of the way to the top."""

    def __init__(self, optimizer: HasParamGroups, warmup_num_steps: int, warmup_type: str) -> None:
        super().__init__(optimizer)
        steps = whole("warmup_num_steps", warmup_num_steps, 0, "give the steps of the warm-up, 0 for none")
        # One step is taken for two, as in DeepSpeed: log(1) is no scale.
        self.warmup_num_steps = max(2, steps) if steps else 0
        if warmup_type not in WARMUP_TYPES:
            raise ValueError(
                f"warmup_type is one of {', '.join(WARMUP_TYPES)}, got {warmup_type!r}"
                f"{did_you_mean(warmup_type, WARMUP_TYPES)}; give one of them"
            )
        self.warmup_type = warmup_type

    def _warmup(self, iteration: int) -> float | None:
        """How far the warm-up has come, 0 to 1; None when it is over (from the start where there is none)."""
        if iteration >= self.warmup_num_steps or not self.warmup_num_steps:
            return None
        if iteration < 0:
            return 0.0
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps

    def _total(self, total_num_steps: int) -> int:
        """`total_num_steps`, checked against the warm-up."""
        total = whole("total_num_steps", total_num_steps, 1, "give the steps of the whole training")
        if total < self.warmup_num_steps:
            logger.warning(
                "%s: training ends in its warm-up, as total_num_steps (%d) is below warmup_num_steps (%d); "
                "lower warmup_num_steps to reach the highest learning rate",
                type(self).__name__,
                total,
                self.warmup_num_steps,
            )
        return total


class WarmupLR(_Warmup):
    """Raise the learning rate from `warmup_min_lr` to `warmup_max_lr`, then keep it.

    With N = warmup_num_steps,

        lr(i) = min_lr + g(i) * (max_lr - min_lr)
        g(i) = log(i + 1) / log(N)  or  i / N      0 <= i < N
        g(i) = 1                                   i >= N
        g(-1) = 0

    N = 1 is taken as 2. N = 0 means no warm-up: the highest learning rate from the first update on (DeepSpeed
    0.19 refuses 0).

    Args:
        optimizer: whose parameter groups' `lr` is written.
        warmup_min_lr: where the warm-up starts; a number, or a list with one for each group. Default 0.
        warmup_max_lr: where it ends; a number, or a list with one for each group. Default 0.001, as
            documented. None stands for the learning rate each group was built with (DeepSpeed 0.19's
            default).
        warmup_num_steps: steps of the warm-up. Default 1000.
        warmup_type: 'log' or 'linear'. Default 'log'. (DeepSpeed takes any other word for 'log'.)
        last_batch_iteration: index of the last batch done; -1 starts from the beginning. Default -1.

    Raises:
        ValueError: a value of the wrong kind, an unknown `warmup_type`, or a list without one value a group.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type)
        self.min_lr, self.max_lr = warmup_min_lr, warmup_max_lr
        self._move_to(last_batch_iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at `iteration` (-1: before the first update)."""
        lows = self._each("warmup_min_lr", self.min_lr)
        highs = self._initial_lrs if self.max_lr is None else self._each("warmup_max_lr", self.max_lr)
        height = self._height(iteration)
        return [low + (high - low) * height for low, high in zip(lows, highs)]

    def _height(self, iteration: int) -> float:
        """Where the learning rate stands between lowest (0) and highest (1)."""
        progress = self._warmup(iteration)
        return 1.0 if progress is None else progress


class WarmupDecayLR(WarmupLR):
    """Raise the learning rate as `WarmupLR` does, then lower it in a straight line.

    With N = warmup_num_steps and T = total_num_steps,

        lr(i) = min_lr + (max_lr - min_lr) * max(0, (T - i) / max(1, T - N))      i >= N

    So it ends at `warmup_min_lr`, at iteration T, and stays there. Where T < N the warm-up is run to its end
    and the learning rate falls to the lowest at once; a warning is logged.

    Args:
        optimizer: whose parameter groups' `lr` is written.
        total_num_steps: steps of the whole training, warm-up included; at least 1.
        warmup_min_lr: see `WarmupLR`. Default 0.
        warmup_max_lr: see `WarmupLR`. Default 0.001.
        warmup_num_steps: see `WarmupLR`. Default 1000.
        warmup_type: see `WarmupLR`. Default 'log'.
        last_batch_iteration: index of the last batch done; -1 starts from the beginning. Default -1.

    Raises:
        ValueError: as `WarmupLR`, or `total_num_steps` below 1.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _Warmup.__init__(self, optimizer, warmup_num_steps, warmup_type)
        self.min_lr, self.max_lr = warmup_min_lr, warmup_max_lr
        self.total_num_steps = self._total(total_num_steps)
        self._move_to(last_batch_iteration)

    def _height(self, iteration: int) -> float:
        progress = self._warmup(iteration)
        if progress is not None:
            return progress
        left = self.total_num_steps - max(iteration, 0)
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Raise each group's own learning rate from a ratio of it to the whole, then lower it along a cosine.

    With N = warmup_num_steps, T = total_num_steps and g as in `WarmupLR`, the learning rate a group was built
    with is multiplied by

        warmup_min_ratio + (1 - warmup_min_ratio) * g(i)                                            i < N
        cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * min(1, (i - N + 1) / (T - N)))) / 2     i >= N

    So it ends at `cos_min_ratio`, at iteration T - 1, and stays there. Where T < N the warm-up is run to its
    end and the ratio falls to the lowest at once; a warning is logged.

    Before the first update the ratio is `warmup_min_ratio`, where the warm-up is documented to start.
    DeepSpeed 0.19 has 0 there, which spends the first batch on an update of size 0.

    Args:
        optimizer: whose parameter groups' `lr` is written, and read: it is the highest learning rate. A group
            that has an `initial_lr` (torch's schedulers and this one set it) is scaled from that.
        total_num_steps: steps of the whole training, warm-up included; at least 1.
        warmup_min_ratio: where the warm-up starts; a number, or a list with one for each group. Default 0.
        warmup_num_steps: steps of the warm-up, 0 for none. Default 1000.
        cos_min_ratio: where the cosine ends; a number, or a list with one for each group. Default 0.0001.
        warmup_type: 'log' or 'linear'. Default 'log'. (DeepSpeed takes any other word for 'log'.)
        last_batch_iteration: index of the last batch done; -1 starts from the beginning. Default -1.

    Raises:
        ValueError: a value of the wrong kind, an unknown `warmup_type`, a list without one value a group, or
            `total_num_steps` below 1.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: PerGroup = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: PerGroup = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.total_num_steps = self._total(total_num_steps)
        self._move_to(last_batch_iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at `iteration` (-1: before the first update)."""
        return [lr * ratio for lr, ratio in zip(self._initial_lrs, self.ratio_at(iteration))]

    def get_lr_ratio(self) -> list[float]:
        """What each group's own learning rate is multiplied by at the present iteration."""
        return self.ratio_at(self.last_batch_iteration)

    def ratio_at(self, iteration: int) -> list[float]:
        """What each group's own learning rate is multiplied by at `iteration`."""
        starts = self._each("warmup_min_ratio", self.warmup_min_ratio)
        ends = self._each("cos_min_ratio", self.cos_min_ratio)
        progress = self._warmup(iteration)
        if progress is not None:
            return [start + (1 - start) * progress for start in starts]
        num_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(num_steps, iteration - self.warmup_num_steps + 1)
        height = (1 + math.cos(math.pi * done / num_steps)) / 2
        return [end + (1 - end) * height for end in ends]
