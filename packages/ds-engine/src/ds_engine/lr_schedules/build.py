"""From the name in a configuration to a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import lr_scheduler

from ds_comm.names import did_you_mean
from ds_engine.lr_schedules.one_cycle import OneCycle
from ds_engine.lr_schedules.range_test import LRRangeTest
from ds_engine.lr_schedules.schedule import HasParamGroups, Schedule
from ds_engine.lr_schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULES: dict[str, type[Schedule]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""The documented schedules by name."""

_NOT_FROM_A_NAME = {
    "ReduceLROnPlateau": "its step() needs a metric; step it yourself after each evaluation",
    "ChainedScheduler": "it is made of schedulers; build it in code and pass it to initialize()",
    "SequentialLR": "it is made of schedulers; build it in code and pass it to initialize()",
}


def build_scheduler(
    name: str, optimizer: HasParamGroups, params: Mapping[str, Any]
) -> Schedule | lr_scheduler.LRScheduler:
    """Build the schedule `name` for `optimizer`.

    Args:
        name: one of `SCHEDULES`, or the name of a class in `torch.optim.lr_scheduler`, in that order.
        optimizer: whose learning rates the schedule writes; torch's classes want a `torch.optim.Optimizer`.
        params: the schedule's other arguments by name.

    Raises:
        ValueError: there is no such schedule, a parameter is unknown or missing, or a value is wrong. The
            message names the nearest known name.
    """
    kind: Any = check_scheduler(name, params)
    return kind(optimizer, **params)


def check_scheduler(name: str, params: Mapping[str, Any]) -> type[Schedule] | type[lr_scheduler.LRScheduler]:
    """The class that `name` means. What can be wrong without an optimizer is an error here: see `build_scheduler`."""
    if name in _NOT_FROM_A_NAME:
        raise ValueError(f"scheduler {name!r} can't be built from a configuration: {_NOT_FROM_A_NAME[name]}")
    torchs = _torch_schedules()
    kind: type[Schedule] | type[lr_scheduler.LRScheduler] | None = SCHEDULES.get(name) or torchs.get(name)
    if kind is None:
        raise ValueError(
            f"scheduler type is one of {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler, "
            f"got {name!r}{did_you_mean(name, [*SCHEDULES, *torchs])}; correct the name"
        )
    accepted = {key: each for key, each in inspect.signature(kind).parameters.items() if key != "optimizer"}
    for key in params:
        if key not in accepted:
            raise ValueError(
                f"scheduler {name} takes {', '.join(accepted)}, got {key!r}{did_you_mean(key, accepted)}; "
                "correct or remove it"
            )
    missing = [key for key, each in accepted.items() if each.default is each.empty and key not in params]
    if missing:
        raise ValueError(
            f"scheduler {name} needs {', '.join(missing)}, got {', '.join(params) or 'no parameters'}: "
            "add them to its params"
        )
    return kind


def _torch_schedules() -> dict[str, type[lr_scheduler.LRScheduler]]:
    return {
        name: each
        for name, each in vars(lr_scheduler).items()
        if inspect.isclass(each)
        and issubclass(each, lr_scheduler.LRScheduler)
        and each is not lr_scheduler.LRScheduler
        and not name.startswith("_")
        and name not in _NOT_FROM_A_NAME
    }
