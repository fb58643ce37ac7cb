"""The learning-rate range test: raise the rate until training diverges, to learn how far it may go."""

from __future__ import annotations

from ds_engine.lr_schedules.schedule import HasParamGroups, PerGroup, Schedule, number, whole


class LRRangeTest(Schedule):
    """Raise the learning rate from a base value at a constant pace, for as long as training runs.

    With n = iteration + 1 batches done,

        lr(iteration) = min_lr * (1 + step_rate * n / step_size)

    where the staircase form takes the floor of n / step_size.

    From "A disciplined approach to neural network hyper-parameters: Part 1" (Smith, 2018, arXiv:1803.09820).

    Args:
        optimizer: whose parameter groups' `lr` is written.
        lr_range_test_min_lr: where the test starts; a number, or a list with one for each group. Default
            0.001.
        lr_range_test_step_size: batches in one interval, at least 1. Default 2000.
        lr_range_test_step_rate: by how many times `min_lr` the rate grows in an interval. Default 1.0.
        lr_range_test_staircase: grow once at the end of each interval instead of at each batch. Default
            False.
        last_batch_iteration: index of the last batch done; -1 starts from the beginning. Default -1.

    Raises:
        ValueError: a value of the wrong kind, or a list that does not have one value a group.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self.min_lr = lr_range_test_min_lr
        self.step_size = whole(
            "lr_range_test_step_size", lr_range_test_step_size, 1, "give the batches between two increases"
        )
        self.step_rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = bool(lr_range_test_staircase)
        self._move_to(last_batch_iteration)

    def lr_at(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at `iteration` (-1: before the first update)."""
        num_batches = iteration + 1
        intervals = num_batches // self.step_size if self.staircase else num_batches / self.step_size
        growth = 1 + self.step_rate * intervals
        return [min_lr * growth for min_lr in self._each("lr_range_test_min_lr", self.min_lr)]
