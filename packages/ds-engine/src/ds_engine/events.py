"""The moments of a step that others can listen to: progress lines, timers, monitors, curricula."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_engine.engine import Engine


class Event(enum.Enum):
    """What happens, in this order, in every micro-batch; the last two at the accumulation boundary only."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    BOUNDARY = "boundary"
    AFTER_STEP = "after step"


class Events:
    """Who listens to what. Listeners run in the order in which they came."""

    def __init__(self) -> None:
        self._listeners: dict[Event, list[Callable[[Engine], None]]] = defaultdict(list)

    def subscribe(self, event: Event, listener: Callable[[Engine], None]) -> None:
        """Calls `listener(engine)` whenever `event` happens."""
        self._listeners[event].append(listener)

    def emit(self, event: Event, engine: Engine) -> None:
        """It has happened."""
        if self._listeners:
            for listener in self._listeners.get(event, ()):
                listener(engine)
