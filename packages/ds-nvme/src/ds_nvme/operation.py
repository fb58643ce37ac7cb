"""One transfer under way: its future, and what it holds until it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ds_nvme.errors import CancelledTransferError, NvmeError, VerifyError, file_error
from ds_nvme.files import OpenFile
from ds_nvme.memory import Memory
from ds_nvme.native import libc
from ds_nvme.plan import TransferPlan
from ds_nvme.regions import IN_FLIGHT, Region
from ds_nvme.task import Task
from ds_nvme.view import View

if TYPE_CHECKING:
    from asyncio import Future

_VERIFIED_AT_ONCE = 1 << 20


def awaited(ending: Any) -> Generator[Any, None, None]:
    """Let asyncio wait for something that has `add_done_callback`."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def ended(_: object) -> None:
        # The loop may be gone when the transfer ends: then nobody waits any more.
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    ending.add_done_callback(ended)
    yield from future


_Ended = TypeVar("_Ended")


def run_callbacks(ended: _Ended, callbacks: list[Callable[[_Ended], object]]) -> None:
    """Calls each with what has ended. What one raises is shown, and reaches neither the others nor the thread."""
    for callback in callbacks:
        try:
            callback(ended)
        except BaseException:
            sys.excepthook(*sys.exc_info())


class Operation(Task):
    """A transfer between a buffer and a file. Wait for it with `result()`, or `await` it in asyncio.

    The buffer's memory stays alive until it ends, and must not be changed (of a write) or used (of a read) before.
    """

    def __init__(self, plan: TransferPlan, file: OpenFile, view: View, region: Region, *, validate: bool) -> None:
        super().__init__(plan, file, view.address)
        self.view = view
        """The buffer."""
        self._region = region
        self._validate = validate
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Operation], object]] = []
        self._ending = False

    # --- for those who wait

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False where `timeout` seconds passed before. Errors are not raised."""
        return self._ended.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error it ended with, or None.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds; it goes on.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self!r} takes longer than {timeout} seconds")
        return self._error

    def result(self, timeout: float | None = None) -> int:
        """Wait, and return the number of bytes moved.

        Raises:
            NvmeError: it failed.
            TimeoutError: it takes longer than `timeout` seconds; it goes on.
        """
        if (error := self.exception(timeout)) is not None:
            raise error
        return self.plan.nbytes

    def cancel(self) -> bool:
        """Hand the kernel no more of it. It ends, with a `CancelledTransferError`, when what is under way has landed.

        Nothing may be concluded about what was moved: of a file that was to grow the end is missing, as after a crash,
        unless everything was under way already; elsewhere old and new bytes are mixed, as they are in a buffer.

        Returns:
            Whether it was cancelled: False where it has ended, or failed, before.
        """
        with self._lock:
            if self._ending or self.failed:
                return False
            self._error = CancelledTransferError(
                f"a transfer arrives whole unless it is cancelled: this {'write' if self.plan.write else 'read'} of "
                f"{self.path} was; start it again"
            )
            self.failed = True
        return True

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """Call `callback(self)` when it has ended: from an I/O thread, or at once where it has already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, int]:
        yield from awaited(self)
        return self.result()

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error is not None else "done"
        return f"<{state}: {self.plan} | {self.path}>".replace("\n ", ";")

    # --- for the workers

    def end(self) -> None:
        """Everything has arrived, or failed: let go of file and memory, and wake who waits."""
        with self._lock:
            self._ending = True
        if self._validate and not self.failed:
            try:
                self._verify()
            except NvmeError as error:
                self.fail(error)
        try:
            self.file.close()
        except OSError as error:  # where filesystems over a network tell late what became of a write
            self.fail(file_error(error.errno or 0, self.path))
        self.view.release()
        IN_FLIGHT.leave(self._region)
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        run_callbacks(self, callbacks)

    def _verify(self) -> None:
        file = OpenFile(self.path, write=False)
        scratch = Memory(_VERIFIED_AT_ONCE)
        position = 0
        while position < self.plan.nbytes:
            offset = self.plan.file_offset + position
            step = min(_VERIFIED_AT_ONCE, self.plan.nbytes - position)
            got = libc.pread(file.cached, scratch.address, step, offset)
            if got <= 0 or not self.view.equals(position, scratch.address, got):
                self.fail(
                    VerifyError(
                        f"file and memory are equal after a transfer: {self.path} differs in the {step} bytes from "
                        f"offset {offset}; did something else write the file or the buffer meanwhile?"
                    )
                )
                break
            position += got
        file.close()
