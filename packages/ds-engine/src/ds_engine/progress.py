"""Progress lines and the wall-clock breakdown: two listeners of the engine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ds_engine.events import Event, Events

if TYPE_CHECKING:
    from ds_engine.engine import Engine

logger = logging.getLogger("ds_engine")


def log_to_stdout() -> None:
    """Makes the progress lines visible where the program has not set logging up itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def print_progress(events: Events, every: int) -> None:
    """Every `every` steps: the step, steps left out, learning rate and momentum."""

    def show(engine: Engine) -> None:
        if engine.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                engine.global_steps,
                engine.skipped_steps,
                engine.get_lr(),
                engine.get_mom(),
            )

    events.subscribe(Event.AFTER_STEP, show)


class WallClock:
    """Rank 0's milliseconds of forward, backward and step: summed over a step's micro-batches, averaged over steps.

    Synchronises the device at every mark, so it costs overlap; switched on by `wall_clock_breakdown`.
    """

    PARTS = {
        "forward": (Event.BEFORE_FORWARD, Event.AFTER_FORWARD),
        "backward": (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
        "step": (Event.BOUNDARY, Event.AFTER_STEP),
    }

    def __init__(self, events: Events, device: torch.device, every: int):
        self.milliseconds = dict.fromkeys(self.PARTS, 0.0)
        self._began: dict[str, float] = {}
        self._device, self._every = device, every
        for part, (begin, end) in self.PARTS.items():
            events.subscribe(begin, self._begin(part))
            events.subscribe(end, self._end(part))
        events.subscribe(Event.AFTER_STEP, self._show)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _begin(self, part: str) -> Callable[[Engine], None]:
        def mark(engine: Engine) -> None:
            self._began[part] = self._now()

        return mark

    def _end(self, part: str) -> Callable[[Engine], None]:
        def mark(engine: Engine) -> None:
            if part in self._began:
                self.milliseconds[part] += (self._now() - self._began.pop(part)) * 1e3

        return mark

    def _show(self, engine: Engine) -> None:
        if engine.global_steps % self._every == 0 and engine.global_rank == 0:
            parts = ", ".join(f"{part}={ms / self._every:.1f} ms" for part, ms in self.milliseconds.items())
            logger.info("time of a step: %s", parts)
        if engine.global_steps % self._every == 0:
            self.milliseconds = dict.fromkeys(self.PARTS, 0.0)
