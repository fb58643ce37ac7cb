"""Signals that ask a measurement to end: the first is noted, a second ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_ASKING = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupts:
    """A context manager that notes Ctrl-C, SIGTERM and SIGHUP, and tells when called whether one came.

    Noted rather than raised: an exception in the middle of a transfer would meet memory and threads half set up.
    Signals that were ignored before (SIGHUP under nohup) stay so. For the main thread.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, or 0 where none came."""
        return 0 if self._number is None else 128 + self._number

    def __enter__(self) -> Interrupts:
        for name in _ASKING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._number = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
