"""What every handle offers, in Python's words: futures, a context manager, plans."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ds_nvme.description import Description
from ds_nvme.documented import Documented
from ds_nvme.errors import ClosedHandleError
from ds_nvme.files import OpenFile, Path
from ds_nvme.operation import Operation
from ds_nvme.plan import TransferPlan
from ds_nvme.regions import IN_FLIGHT, Region
from ds_nvme.view import View

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle(Documented):
    """Both faces of a handle, and how a transfer begins and ends. Use `AioHandle` or `GdsHandle`.

    Args:
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism: see there.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, intra_op_parallelism: int
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._process = os.getpid()
        self._gate = threading.Lock()

    def _close_with(self, *ends: Callable[[], object]) -> None:
        """What closes it, in order. To be called once, when everything runs."""
        # Also at the interpreter's exit and when the handle is forgotten: what is in flight is finished.
        self._finalizer = weakref.finalize(self, _close, self._process, (*ends, self._locked.close))

    def _accept(self, view: View) -> None:
        """Refuse a buffer that this sort of handle can't move, before any file is touched."""

    @abstractmethod
    def _plan(self, view: View, file: OpenFile, file_offset: int, write: bool) -> TransferPlan:
        """How a transfer goes."""

    @abstractmethod
    def _put(self, operation: Operation) -> None:
        """Carry out an operation, soon, and end it."""

    def _put_at_once(self, operation: Operation) -> bool:
        """Carry out and end an operation whose caller waits for it anyway, if it is small; False where it isn't."""
        return False

    def _operation(self, plan: TransferPlan, file: OpenFile, view: View, region: Region, validate: bool) -> Operation:
        return Operation(plan, file, view, region, validate=validate)

    @abstractmethod
    def describe(self, filename: Path | None = None) -> Description:
        """Which way transfers go and why; with a file, also how that file can be accessed. Prints as text."""

    # --- Python's face

    def start_read(self, buffer: Any, filename: Path, file_offset: int = 0, *, validate: bool = False) -> Operation:
        """Begin to fill the whole buffer from a file.

        Args:
            buffer: contiguous and writable. On a device: used after everything that is queued on the current stream.
            filename: the file.
            file_offset: its first byte to read. Default: 0.
            validate: afterwards compare the buffer with the file. Default: false.

        Raises:
            InvalidBufferError, MissingFileError, AccessError, ClosedHandleError.
            TruncatedFileError: the file ends too early.
            DeviceError: a copy to the device failed.
            OverlapError: a write of these bytes is in flight.
        """
        return self._start(buffer, filename, file_offset, write=False, validate=validate)

    def start_write(self, buffer: Any, filename: Path, file_offset: int = 0, *, validate: bool = False) -> Operation:
        """Begin to write the whole buffer to a file, which is created where it doesn't exist.

        Args:
            buffer: contiguous. On a device: its contents when everything is done that is queued on the current stream.
            filename: the file.
            file_offset: its first byte to write. Default: 0.
            validate: afterwards compare the file with the buffer. Default: false.

        Raises:
            InvalidBufferError, AccessError, NoSpaceError, DeviceError, ClosedHandleError.
            OverlapError: another transfer of these bytes is in flight.
        """
        return self._start(buffer, filename, file_offset, write=True, validate=validate)

    def close(self) -> None:
        """Wait for everything in flight, then give threads, kernel resources and locked memory back.

        Tensors of `new_cpu_locked_tensor` stay valid, no longer locked. Further calls do nothing.
        """
        with self._gate:  # no operation begins between its check that the handle is open and this
            closing = self._finalizer.detach()
        if closing is not None:  # outside the gate: a callback that starts a transfer must get its answer
            _, close, (process, ends), _ = closing
            close(process, ends)

    def plan(self, buffer: Any, filename: Path, file_offset: int = 0, *, write: bool = False) -> TransferPlan:
        """What `start_read` or `start_write` would do, without doing it. The file must exist."""
        view = View(buffer, writable=not write)
        try:
            self._accept(view)
            # For reading even where it would be written, so that nothing is created.
            file = OpenFile(filename, write=False)
            try:
                return self._plan(view, file, file_offset, write)
            finally:
                file.close()
        finally:
            view.release()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__}{state} {self._block_size} x {self._queue_depth}>"

    # --- how

    def _start(
        self, buffer: Any, filename: Path, file_offset: int, *, write: bool, validate: bool, here: bool = False
    ) -> Operation:
        """Begin a transfer; one that is small, and whose caller waits anyway (`here`), may be done on return."""
        self._require_open()
        if file_offset < 0:
            raise ValueError(f"a file offset is 0 or more bytes: got {file_offset}")
        with ExitStack() as undo:
            view = View(buffer, writable=not write)
            undo.callback(view.release)
            self._accept(view)
            file = OpenFile(filename, write=write)
            undo.callback(file.close)
            if not write:
                file.require(file_offset, view.nbytes)
            region = Region(file.identity, file.path, file_offset, file_offset + view.nbytes, write)
            IN_FLIGHT.enter(region)
            undo.callback(IN_FLIGHT.leave, region)
            plan = self._plan(view, file, file_offset, write)
            if plan.any_cached:
                _ = file.cached  # opened now, where an error is the caller's, not a worker's
            if plan.grow_to is not None:
                file.grow(file_offset, plan.grow_to)
            operation = self._operation(plan, file, view, region, validate)
            if here and self._put_at_once(operation):
                undo.pop_all()
                return operation
            with self._gate:
                self._require_open()
                self._put(operation)
                undo.pop_all()
        return operation

    def _access(self, filename: Path | None) -> str | None:
        """How a file can be accessed, in words."""
        if filename is None:
            return None
        file = OpenFile(filename, write=False)
        try:
            return f"{file.path}: {file.alignment()}"
        finally:
            file.close()

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedHandleError("a handle is open: this one was closed; make a new one")
        if os.getpid() != self._process:
            raise ClosedHandleError(
                "a handle belongs to the process that made it: this is a fork without its threads; make a new one"
            )


def _close(process: int, ends: tuple[Callable[[], object], ...]) -> None:
    if os.getpid() == process:  # a fork has none of the threads
        for end in ends:
            end()
