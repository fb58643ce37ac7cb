"""What every schedule shares: the iteration counter, values per parameter group, writing to the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch

PerGroup = float | Sequence[float]
"""One number for every parameter group, or a list with one number a group."""


class HasParamGroups(Protocol):
    """All a schedule needs of an optimizer: `param_groups`, each a dict with an `lr`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, which a schedule writes to."""
        ...


class Schedule(ABC):
    """A schedule: a pure function of the iteration (`lr_at`) plus the iteration it stands at.

    Iteration -1 is the optimizer before its first update. `step()` is called after each update and moves to
    the next iteration, so update k (from 0) runs with the values of iteration k - 1.

    A subclass calls this constructor first, keeps its settings, and calls `_move_to` last.
    """

    def __init__(self, optimizer: HasParamGroups) -> None:
        if not isinstance(getattr(optimizer, "param_groups", None), Sequence):
            raise TypeError(
                f"{type(self).__name__} needs an optimizer with a list of `param_groups`, got "
                f"{type(optimizer).__name__}: pass a torch.optim.Optimizer or an object with that attribute"
            )
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        # What each parameter group was built with, for the schedules that scale it. A group keeps it as
        # `initial_lr`, where torch's schedulers do, so that a schedule built after the optimizer was loaded
        # finds it too.
        self._initial_lrs: list[float] = []
        self._last_lr: list[float] = []

    @abstractmethod
    def lr_at(self, iteration: int) -> list[float]:
        """The learning rate of each parameter group at `iteration` (-1: before the first update)."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next iteration, or to `last_batch_iteration`, and write its values to the optimizer.

        Raises:
            ValueError: `last_batch_iteration` is below -1.
        """
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self._move_to(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, computed for the present iteration."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group that was last written to the optimizer."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the iteration. Settings are not part of it; they come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Stand where `state_dict` says and write that iteration's values to the optimizer.

        DeepSpeed leaves the optimizer alone until the next `step()`, so a schedule resumed without its
        optimizer's state makes one update with the wrong learning rate.

        Raises:
            ValueError: `state_dict` has no `last_batch_iteration`.
        """
        if "last_batch_iteration" not in state_dict:
            raise ValueError(
                f"{type(self).__name__}'s state has the key 'last_batch_iteration', "
                f"got {sorted(state_dict)}: pass what state_dict() of the same schedule returned"
            )
        self._move_to(state_dict["last_batch_iteration"])

    def _move_to(self, iteration: int) -> None:
        """Stand at `iteration` and write its values to the optimizer."""
        iteration = whole(
            "last_batch_iteration",
            iteration,
            -1,
            "give the index of the last batch done, -1 before the first",
        )
        for group in self.optimizer.param_groups[len(self._initial_lrs) :]:  # the new ones
            self._initial_lrs.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        lrs = self.lr_at(iteration)
        self.last_batch_iteration = iteration
        for group, lr in zip(self.optimizer.param_groups, lrs):
            write(group, "lr", lr)
        self._last_lr = lrs

    def _each(self, name: str, value: PerGroup) -> list[float]:
        """`value` for each parameter group; expanded at every use, as groups may be added later."""
        num_groups = len(self.optimizer.param_groups)
        if _is_number(value):
            return [float(value)] * num_groups  # type: ignore[arg-type]
        if not isinstance(value, Sequence) or not all(map(_is_number, value)):
            raise ValueError(
                f"{name} is a number, or a list with one number for each parameter group, got {value!r}: "
                "write it as a number"
            )
        if len(value) != num_groups:
            raise ValueError(
                f"{name} as a list has one value for each of the optimizer's {num_groups} parameter groups, "
                f"got {len(value)}: {value!r}; give {num_groups} values, or one number for all"
            )
        return [float(each) for each in value]


def write(group: dict[str, Any], key: str, value: float) -> None:
    """Set `group[key]`; a tensor (a captured graph reads it) is filled in place."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def whole(name: str, value: int, least: int, mend: str) -> int:
    """`value` if it is a whole number of at least `least`.

    Raises:
        ValueError: it is not; the message ends with `mend`.
    """
    if not _is_number(value) or not float(value).is_integer() or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}, got {value!r}: {mend}")
    return int(value)


def number(name: str, value: float) -> float:
    """`value` as a float.

    Raises:
        ValueError: it is not a number.
    """
    if not _is_number(value):
        raise ValueError(f"{name} is a number, got {value!r}: write it as a number")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
