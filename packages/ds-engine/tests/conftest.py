"""Fixtures: engines in this process, which is then a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_engine

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 0,
}

Start = Callable[..., Any]


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no launcher started; a process group that a test starts ends with it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def start(alone: None) -> Iterator[Start]:
    """`start(config, model=…, …)` is what `initialize` returns; `config` is put on top of a small default.

    Engines are destroyed at the end.
    """
    engines: list[ds_engine.Engine] = []

    def begin(config: dict[str, Any] | None = None, **given: Any) -> Any:
        made = ds_engine.initialize(**{"model": _linear(), **given}, config={**CONFIG, **(config or {})})
        engines.append(made[0])
        return made

    yield begin
    for engine in engines:
        engine.destroy()
