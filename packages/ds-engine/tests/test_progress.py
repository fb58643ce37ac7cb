"""Progress lines and the wall-clock breakdown: who prints what, and when."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_engine import initialize
from testing import RankPool

Ranks = Callable[[int], RankPool]

LINE = re.compile(r"step=(\d+), skipped=(\d+), lr=\[0\.1\], mom=\[0\.5\]")
TIMES = re.compile(r"time of a step: forward=(\S+) ms, backward=(\S+) ms, step=(\S+) ms")


class Notes(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines(num_steps: int, plain: bool = False, **config: Any) -> list[str]:
    """What a rank's engine logs in so many steps of two micro-batches, by engine.backward or the loss's own."""
    logger, notes = logging.getLogger("ds_engine"), Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        engine, *_ = initialize(
            model=nn.Linear(4, 3),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
                **config,
            },
        )
        notes.lines.clear()
        for _ in range(2 * num_steps):
            loss = engine(torch.ones(1, 4)).sum()
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        engine.destroy()
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)
    return notes.lines


def test_a_line_every_so_many_steps_on_rank_0(ranks: Ranks) -> None:
    first, second = ranks(2).run(lines, 7, steps_per_print=3)
    found = [LINE.fullmatch(line) for line in first]
    assert [match and match.groups() for match in found] == [("3", "0"), ("6", "0")]
    assert second == []


@pytest.mark.parametrize(("config", "count"), [({}, 2), ({"steps_per_print": 0}, 0), ({"steps_per_print": None}, 0)])
def test_every_10_steps_by_default_and_never_at_0(config: dict[str, Any], count: int, ranks: Ranks) -> None:
    first, _ = ranks(2).run(lines, 20, **config)
    assert len(first) == count


def test_the_wall_clock_breakdown(ranks: Ranks) -> None:
    first, second = ranks(2).run(lines, 4, steps_per_print=2, wall_clock_breakdown=True)
    times = [match for line in first if (match := TIMES.fullmatch(line))]
    assert len(times) == 2 and len(first) == 4 and second == []
    for match in times:
        assert all(0 <= float(part) < 10_000 for part in match.groups())
    assert sum(float(part) for match in times for part in match.groups()) > 0


@pytest.mark.parametrize("plain", [False, True])
def test_times_are_of_one_step(plain: bool, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once a look: a micro-batch's parts take a tick each, a step's two ticks, the step one."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("ds_engine.progress.WallClock._now", lambda self: next(ticks))
    printed = lines(4, plain, steps_per_print=2, wall_clock_breakdown=True)
    found = [match for line in printed if (match := TIMES.match(line))]
    assert [match.groups() for match in found] == [("2000.0", "2000.0", "1000.0")] * 2


PROGRAM = """
import logging, sys, torch, ds_engine
{setup}
engine, *_ = ds_engine.initialize(
    model=torch.nn.Linear(1, 1),
    config={{"train_batch_size": 1, "steps_per_print": 1, "optimizer": {{"type": "SGD"}}}},
)
engine.backward(engine(torch.ones(1, 1)).sum())
engine.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("setup", ["", "logging.basicConfig(level=logging.INFO, stream=sys.stdout)"])
def test_lines_are_seen_once_whoever_sets_logging_up(setup: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step=1, skipped=0") == 1, done.stdout
