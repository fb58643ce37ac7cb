"""The documented names of a handle: what DeepNVMe's tutorial calls them, and what they return there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ds_nvme.errors import NvmeError
from ds_nvme.files import Path
from ds_nvme.locked import LockedTensors
from ds_nvme.operation import Operation


class Documented(ABC):
    """The documented face of a handle, on top of `_start`.

    Args:
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism: see `AioHandle`.

    Raises:
        ValueError: an option is out of range.

    Source: DeepNVMe tutorial, "API documentation".
    """

    def __init__(
        self,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        intra_op_parallelism: int,
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
        self._intra_op_parallelism = intra_op_parallelism
        self._unwaited: list[Operation] = []
        self._locked = LockedTensors()

    @abstractmethod
    def _start(
        self, buffer: Any, filename: Path, file_offset: int, *, write: bool, validate: bool, here: bool = False
    ) -> Operation:
        """Begin a transfer; one that is small, and whose caller waits anyway (`here`), may be done on return."""

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
            first, *others = errors
            if isinstance(first, NvmeError):
                first.others = tuple(others)
            raise first
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
        return self._intra_op_parallelism

    def _account(
        self, buffer: Any, filename: Path, file_offset: int, write: bool, validate: bool, asynchronous: bool
    ) -> int:
        operation = self._start(buffer, filename, file_offset, write=write, validate=validate, here=not asynchronous)
        if asynchronous:
            self._unwaited.append(operation)
            return 0
        operation.result()
        return 1
