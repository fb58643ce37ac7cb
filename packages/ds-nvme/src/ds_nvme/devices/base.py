"""The interface of a device: memory of its own, and copies between that and the host's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ds_nvme.memory import Memory


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Wait, without the GIL, until all bytes have arrived. Raises what the device reports."""


class Device(ABC):
    """One device of this machine. Safe from any thread."""

    name: str
    """As its library writes it, such as cuda:0."""
    kind: str
    """Its sort, such as cuda."""

    @abstractmethod
    def using(self) -> AbstractContextManager[object]:
        """Let the calling thread use it, for a while."""

    @abstractmethod
    def lock_pages(self, memory: Memory) -> str | None:
        """Page-lock host memory for this device, so that copies take place while the host does something else.

        Returns:
            None, or why it can't be: copies are then right too, but slower.
        """

    @abstractmethod
    def unlock_pages(self, memory: Memory) -> None:
        """Undo `lock_pages`."""


class DeviceBuffer(ABC):
    """A contiguous buffer on a device, as one transfer uses it.

    Made in the thread, and on the stream, that asks for the transfer: copies come after everything that was queued
    there before. So what a kernel has yet to compute is what gets written, and what a kernel has yet to read isn't
    overwritten.

    A library can let its arrays take part in transfers with a method `__device_buffer__()` that returns one of these.
    """

    device: Device
    address: int
    """Of the first byte, on the device."""
    nbytes: int

    @abstractmethod
    def copy_to_host(self, position: int, nbytes: int, memory: Memory, at: int) -> Copy:
        """Begin to copy bytes `[position, position + nbytes)` of the buffer to `memory`, from its byte `at` on.

        Copies in one direction end in the order they were begun in. The memory stays as it is until the copy has ended:
        that is the caller's part.
        """

    @abstractmethod
    def copy_to_device(self, position: int, nbytes: int, memory: Memory, at: int) -> Copy:
        """Begin to copy the other way. After its `wait`, everything queued on any stream sees the bytes."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait, without the GIL, until everything has ended that was queued before the transfer was asked for."""

    @abstractmethod
    def empty(self, num_elements: int, alignment: int) -> Any:
        """A new flat array of the same library, dtype and device, whose memory begins at a multiple of `alignment`
        bytes and shares no such stretch with other arrays."""
