"""Ten cycles of initialize, train, destroy leave nothing behind: no tensors, memory, threads or files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_engine import initialize
from testing import RankPool

Ranks = Callable[[int], RankPool]

CYCLES, WARM_UP = 10, 3
WIDTH = 1024
COPY_BYTES = 4 * (WIDTH + 1) * WIDTH * 4
"""One fp32 copy of the model: 17 MB."""

CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0, fp32": {},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "auto_cast": True}},
    "stage 2, fp16, overlap": {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": WIDTH * WIDTH},
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8},
    },
    "stage 3, bf16": {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2 * WIDTH * WIDTH},
        "bf16": {"enabled": True, "auto_cast": True},
    },
}


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def once(config: dict[str, Any], module: nn.Module | None = None) -> Any:
    """One cycle: two steps of two micro-batches."""
    engine, *_ = initialize(
        model=module or model(),
        training_data=torch.ones(16, WIDTH),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "steps_per_print": 1000,
            "wall_clock_breakdown": True,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "scheduler": {"type": "WarmupLR"},
            **config,
        },
    )
    for batch in list(engine.training_dataloader)[:4]:
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    engine.destroy()
    return engine


def tensor_bytes() -> int:
    """What living tensors hold, each storage once."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter)
    }
    return sum(storages.values())


def facts() -> dict[str, int]:
    """What this process holds."""
    held = tensor_bytes()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which is nobody's leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": held,
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def growth(config: dict[str, Any], leak: bool = False) -> dict[str, int]:
    """How much more the process holds after ten cycles than before. `leak`: keep each cycle's model."""
    kept = [once(config) for _ in range(WARM_UP)]
    kept.clear()
    before = facts()
    for _ in range(CYCLES):
        engine = once(config)
        if leak:
            kept.append(engine.module)
        del engine
    after = facts()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ten_cycles_leave_everything_flat(config: dict[str, Any], ranks: Ranks) -> None:
    for grown in ranks(2).run(growth, config):
        assert grown["tensors"] <= 0
        assert grown["resident"] < COPY_BYTES, "a copy of the model a cycle would be ten"
        assert grown["threads"] <= 0 and grown["files"] <= 0


def test_a_leak_would_be_seen(ranks: Ranks) -> None:
    """The measurement measures: a model kept each cycle is above both bounds."""
    for grown in ranks(2).run(growth, {}, leak=True):
        assert grown["tensors"] >= CYCLES * COPY_BYTES
        assert grown["resident"] > 8 * COPY_BYTES


def hooks_after_cycles(stage: int) -> list[int]:
    """Hooks on a model's parameters after it went through an engine, three times over."""
    module = model()
    counts = []
    for _ in range(3):
        once({"zero_optimization": {"stage": stage}}, module)
        count = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
        counts.append(count + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()))
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters()), "storage of its own"
    return counts


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_comes_out_as_it_went_in(stage: int, ranks: Ranks) -> None:
    assert ranks(2).run(hooks_after_cycles, stage) == [[0, 0, 0]] * 2


def freed_without_collection(stage: int) -> bool:
    """A destroyed engine and its model go when the last name does, without waiting for the garbage collector."""
    once({})
    gc.collect()
    gc.disable()
    try:
        engine = once({"zero_optimization": {"stage": stage}})
        watched = weakref.ref(engine), weakref.ref(next(engine.module.parameters()))
        del engine
        return all(each() is None for each in watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_goes_at_once(stage: int, ranks: Ranks) -> None:
    assert ranks(2).run(freed_without_collection, stage) == [True, True]
