"""Handles of calls that run on: anything with `wait()`."""

from __future__ import annotations

import queue
import threading
import weakref
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
    """A job for a `Worker`; `wait()` raises what it raised."""

    def __init__(self, job: Callable[[], None]):
        self._job: Callable[[], None] | None = job
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """The job was done, or has failed."""
        return self._over.is_set()

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


class Worker:
    """A thread that does jobs in the order they come in. The first job starts it.

    It ends with `close`, or when nothing refers to the Worker any more: the thread itself does not.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._last: Queued | None = None  # jobs end in order, so its end is the end of all
        self._end: Callable[[], Any] | None = None
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> Queued:
        """Runs `job` on the thread, after those submitted before."""
        queued = Queued(job)
        with self._lock:  # what is `_last` must be last in the queue too
            if self._end is None:
                thread = threading.Thread(target=_work, args=(self._jobs,), name="ds-comm", daemon=True)
                thread.start()
                finalizer = weakref.finalize(self, _end, self._jobs, thread)
                finalizer.atexit = False  # a daemon ends with the interpreter
                self._end = finalizer
            self._last = queued
            self._jobs.put(queued)
        return queued

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job` now, in this thread; after what was submitted, if any of that is left."""
        last = self._last
        if last is None:
            job()
        elif last.is_over:
            self._last = None  # an error it holds would hold the frames it passed through
            job()
        else:
            self.submit(job).wait()

    def close(self) -> None:
        """Ends the thread after the jobs that were submitted. The Worker can't be used any more."""
        if self._end is not None:
            self._end()


def _work(jobs: queue.SimpleQueue[Queued | None]) -> None:
    while (queued := jobs.get()) is not None:
        queued.run()
        del queued  # while waiting for the next, hold nothing


def _end(jobs: queue.SimpleQueue[Queued | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a job may hold the last reference to the Worker
        # Jobs that are left fail at once (their links are closed), so this is soon. The limit is for a collector
        # that calls from within the threading module, whose lock the ending thread wants.
        thread.join(5.0)
