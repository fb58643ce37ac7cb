"""The handle: transfers between buffers and files, in the documented words and in Python's."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack
from typing import Any

from ds_nvme.blocks import carry_out
from ds_nvme.description import Description
from ds_nvme.engines.base import Engine
from ds_nvme.engines.choose import candidates, names, refusal
from ds_nvme.errors import ClosedHandleError, EngineError
from ds_nvme.files import OpenFile, Path
from ds_nvme.locked import LockedTensors
from ds_nvme.operation import Operation
from ds_nvme.plan import TransferPlan, plan_transfer
from ds_nvme.regions import IN_FLIGHT, Region
from ds_nvme.share import divide
from ds_nvme.view import View
from ds_nvme.worker import Worker


class AioHandle:
    """Moves tensors between memory and files, asynchronously. Use it as a context manager, or `close()` it.

    The documented names: `sync_*` wait; `async_*` return at once and `wait()` waits for all of them. Python's:
    `start_read` and `start_write` return an `Operation`, a future of its own that asyncio can await; `wait()` leaves
    those alone. Buffers are anything contiguous: numpy arrays, bytearrays, memoryviews, torch tensors on the CPU.

    A write replaces bytes of the file in place, creates the file where there is none, and never shortens it.
    Safe to use from several threads.

    Args:
        block_size: bytes of one request to the drive.
        queue_depth: most requests in flight, for each of the `intra_op_parallelism` threads.
        single_submit: hand requests to the kernel one by one.
        overlap_events: refill the queue as requests end; otherwise only when all in flight have ended.
        intra_op_parallelism: threads that share each operation.
        engine: "auto", or one of `ds_nvme.engine_names()`.

    Raises:
        ValueError: an option is out of range.
        EngineError: the named engine can't run here.

    Source: DeepNVMe tutorial, "Advanced Handle Creation".
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        *,
        engine: str = "auto",
    ) -> None:
        for option, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if value < 1:
                raise ValueError(f"{option} is 1 or more: got {value}")
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._process = os.getpid()
        self._workers, self._engine, self._why = self._hire(engine, intra_op_parallelism)
        self._gate = threading.Lock()
        self._done_here = 0
        self._turn = 0
        self._unwaited: list[Operation] = []
        self._locked = LockedTensors()
        # Also at the interpreter's exit and when the handle is forgotten: what is in flight is finished.
        self._finalizer = weakref.finalize(self, _close, self._workers, self._process)

    # --- Python's face

    def start_read(self, buffer: Any, filename: Path, file_offset: int = 0, *, validate: bool = False) -> Operation:
        """Begin to fill the whole buffer from a file.

        Args:
            buffer: contiguous and writable.
            filename: the file.
            file_offset: its first byte to read. Default: 0.
            validate: afterwards compare the buffer with the file. Default: false.

        Raises:
            InvalidBufferError, MissingFileError, AccessError, ClosedHandleError.
            TruncatedFileError: the file ends too early.
            OverlapError: a write of these bytes is in flight.
        """
        return self._start(buffer, filename, file_offset, write=False, validate=validate)

    def start_write(self, buffer: Any, filename: Path, file_offset: int = 0, *, validate: bool = False) -> Operation:
        """Begin to write the whole buffer to a file, which is created where it doesn't exist.

        Args:
            buffer: contiguous.
            filename: the file.
            file_offset: its first byte to write. Default: 0.
            validate: afterwards compare the file with the buffer. Default: false.

        Raises:
            InvalidBufferError, AccessError, NoSpaceError, ClosedHandleError.
            OverlapError: another transfer of these bytes is in flight.
        """
        return self._start(buffer, filename, file_offset, write=True, validate=validate)

    def plan(self, buffer: Any, filename: Path, file_offset: int = 0, *, write: bool = False) -> TransferPlan:
        """What `start_read` or `start_write` would do, without doing it. The file must exist."""
        view = View(buffer, writable=not write)
        try:
            # For reading even where it would be written, so that nothing is created.
            file = OpenFile(filename, write=False)
            try:
                return self._plan(view, file, file_offset, write)
            finally:
                file.close()
        finally:
            view.release()

    def describe(self, filename: Path | None = None) -> Description:
        """Which way transfers go and why; with a file, also how that file can be accessed. Prints as text."""
        file_access = None
        if filename is not None:
            file = OpenFile(filename, write=False)
            try:
                file_access = f"{file.path}: {file.alignment()}"
            finally:
                file.close()
        return Description(
            engine=self._engine.name,
            path=self._engine.path(),
            why=self._why,
            refused={name: reason for name in names() if (reason := refusal(name)) is not None},
            block_size=self._block_size,
            queue_depth=self._queue_depth,
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
            intra_op_parallelism=len(self._workers),
            blocks_at_once=self._done_here,
            straight_blocks=sum(worker.counts.straight for worker in self._workers),
            bounced_blocks=sum(worker.counts.bounced for worker in self._workers),
            mended_blocks=sum(worker.counts.mended for worker in self._workers),
            file=file_access,
        )

    def close(self) -> None:
        """Wait for everything in flight, then give threads and kernel resources back. Further calls do nothing."""
        with self._gate:  # no operation begins between its check that the handle is open and this
            self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def __enter__(self) -> AioHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<aio_handle{state} {self._engine.name} {self._block_size} x {self._queue_depth}>"

    # --- the documented face

    def sync_pread(self, buffer: Any, filename: Path, file_offset: int = 0) -> int:
        """Fill the whole buffer from a file; 1, the number of completed operations. Errors: see `start_read`."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Any, filename: Path, file_offset: int = 0) -> int:
        """Write the whole buffer to a file; 1, the number of completed operations. Errors: see `start_write`."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Any, filename: Path, file_offset: int = 0) -> int:
        """Begin to fill the whole buffer from a file; 0. `wait()` tells the outcome. Errors: see `start_read`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Any, filename: Path, file_offset: int = 0) -> int:
        """Begin to write the whole buffer to a file; 0. `wait()` tells the outcome. Errors: see `start_write`."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def pread(self, buffer: Any, filename: Path, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`async_pread` or `sync_pread`, and with `validate` a comparison of buffer and file afterwards."""
        return self._account(buffer, filename, file_offset, False, validate, async_)

    def pwrite(self, buffer: Any, filename: Path, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`async_pwrite` or `sync_pwrite`, and with `validate` a comparison of file and buffer afterwards."""
        return self._account(buffer, filename, file_offset, True, validate, async_)

    def read(self, buffer: Any, filename: Path, validate: bool = False, file_offset: int = 0) -> int:
        """A blocking read; 1, the number of completed operations."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: Any, filename: Path, validate: bool = False, file_offset: int = 0) -> int:
        """A blocking write; 1, the number of completed operations."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def wait(self) -> int:
        """Wait for all `async_*` operations since the last `wait()`.

        Returns:
            Their number.

        Raises:
            NvmeError: of the first that failed; `others` holds the errors of the rest. All have ended by then.
        """
        operations, self._unwaited = self._unwaited, []
        errors = [error for operation in operations if (error := operation.exception()) is not None]
        if errors:
            errors[0].others = tuple(errors[1:])  # type: ignore[attr-defined]
            raise errors[0]
        return len(operations)

    def new_cpu_locked_tensor(self, num_elements: int, like: Any) -> Any:
        """Page-locked, page-aligned host memory, which moves without a copy.

        Args:
            num_elements: its elements.
            like: an array, tensor or buffer whose kind and dtype it gets: a tensor for a tensor, a numpy array for a
                numpy array, else a memoryview. Uninitialised.

        Raises:
            BudgetError: more than the process may lock.
        """
        return self._locked.new(num_elements, like)

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Unlock memory of `new_cpu_locked_tensor`; it is freed when nothing refers to it any more.

        Returns:
            Whether it was this handle's.
        """
        return self._locked.free(tensor)

    def get_block_size(self) -> int:
        """Bytes of one request to the drive."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Most requests in flight, each thread."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Whether requests are handed to the kernel one by one."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled as requests end."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads that share each operation."""
        return len(self._workers)

    # --- how

    def _hire(self, name: str, count: int) -> tuple[list[Worker], type[Engine], str]:
        """Workers with the engine of that name, or with "auto" the first that runs; and why it is this one."""
        refused: list[str] = []
        for engine in candidates(name):
            workers: list[Worker] = []
            try:
                for index in range(count):
                    workers.append(
                        Worker(
                            engine,
                            self._queue_depth,
                            single_submit=self._single_submit,
                            overlap=self._overlap_events,
                            name=f"ds-nvme-{engine.name}-{index}",
                        )
                    )
            except EngineError as error:
                _close(workers, self._process)
                refused.append(f"not {engine.name}: {error}")
            else:
                return workers, engine, "; ".join(["asked for" if name != "auto" else "the first that runs", *refused])
        raise EngineError(f"engine {name!r} runs here: {'; '.join(refused)}; use engine='auto'")

    def _start(
        self, buffer: Any, filename: Path, file_offset: int, *, write: bool, validate: bool, here: bool = False
    ) -> Operation:
        """Begin a transfer; one that is small, and whose caller waits anyway (`here`), is done on return."""
        self._require_open()
        if file_offset < 0:
            raise ValueError(f"a file offset is 0 or more bytes: got {file_offset}")
        with ExitStack() as undo:
            view = View(buffer, writable=not write)
            undo.callback(view.release)
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
            operation = Operation(plan, file, view, region, validate=validate)
            if here and plan.blocks <= 1:
                undo.pop_all()
                self._done_here += 1
                carry_out(operation)
                return operation
            shares = divide(operation, len(self._workers))
            operation.begin(len(shares))
            with self._gate:
                self._require_open()
                undo.pop_all()
                self._turn += 1
                for index, share in enumerate(shares):
                    self._workers[(self._turn + index) % len(self._workers)].put(share)
        return operation

    def _plan(self, view: View, file: OpenFile, file_offset: int, write: bool) -> TransferPlan:
        return plan_transfer(
            write=write,
            address=view.address,
            nbytes=view.nbytes,
            file_offset=file_offset,
            file_size=file.size,
            alignment=file.alignment(),
            block_size=self._block_size,
        )

    def _account(
        self, buffer: Any, filename: Path, file_offset: int, write: bool, validate: bool, asynchronous: bool
    ) -> int:
        operation = self._start(buffer, filename, file_offset, write=write, validate=validate, here=not asynchronous)
        if asynchronous:
            self._unwaited.append(operation)
            return 0
        operation.result()
        return 1

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedHandleError("a handle is open: this one was closed; make a new one")
        if os.getpid() != self._process:
            raise ClosedHandleError(
                "a handle belongs to the process that made it: this is a fork without its threads; make a new one"
            )


def _close(workers: list[Worker], process: int) -> None:
    if os.getpid() == process:  # a fork has none of the threads
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join()
