"""Several operations that are one thing to their user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from ds_nvme.operation import Operation, awaited, run_callbacks

T = TypeVar("T")


class Gathered(Generic[T]):
    """Ends when all its operations have. Wait with `result()`, or `await` it in asyncio.

    Args:
        operations: to wait for.
        value: the result, where all went well.
        on_end: called once, with whether all went well, before anyone who waits is woken; by an I/O thread.
    """

    def __init__(
        self, operations: Sequence[Operation], value: T, on_end: Callable[[bool], object] | None = None
    ) -> None:
        self._operations = operations
        self._value = value
        self._on_end = on_end
        self._lock = threading.Lock()
        self._left = len(operations)
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Gathered[T]], object]] = []
        if not operations:
            self._end()
        for operation in operations:
            operation.add_done_callback(self._one_ended)

    def done(self) -> bool:
        """Whether all have ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all have ended; False where `timeout` seconds passed before. Errors are not raised."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait, and return the result.

        Raises:
            NvmeError: of the first operation that failed.
            TimeoutError: it takes longer than `timeout` seconds; it goes on.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{len(self._operations)} transfers take longer than {timeout} seconds")
        for operation in self._operations:
            operation.result()
        return self._value

    def add_done_callback(self, callback: Callable[[Gathered[T]], object]) -> None:
        """Call `callback(self)` when all have ended: from an I/O thread, or at once where they have already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        yield from awaited(self)
        return self.result()

    def _one_ended(self, _: Operation) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _end(self) -> None:
        if self._on_end is not None:
            self._on_end(all(operation.exception() is None for operation in self._operations))
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        run_callbacks(self, callbacks)
