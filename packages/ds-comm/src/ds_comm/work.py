"""Handles of calls that run on: anything with `wait()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Work(Protocol):
    """A collective under way. torch's own handles satisfy it too."""

    def wait(self) -> Any:
        """Returns when the result may be used (on a GPU: by the current stream)."""


class Done:
    """A call that was complete when it returned."""

    def wait(self) -> bool:
        """Returns at once."""
        return True


class Deferred:
    """Handles of several transfers and what is left to do when they have arrived.

    `finish` runs once, in the first `wait()`; transfers progress without it.
    """

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None):
        self._works, self._finish = works, finish

    def wait(self) -> bool:
        """Waits for every transfer, then finishes."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


class Queued:
    """A job for another thread; `wait()` raises what it raised."""

    def __init__(self, job: Callable[[], None]):
        self._job: Callable[[], None] | None = job
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Does the job, in the calling thread."""
        assert self._job is not None
        try:
            self._job()
        except BaseException as error:
            self._error = error
        self._job = None  # the tensors it holds may go
        self._over.set()

    def wait(self) -> bool:
        """Waits for the other thread."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return True
