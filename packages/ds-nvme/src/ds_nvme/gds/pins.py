"""Device memory that one handle has registered with cuFile."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ds_nvme.devices.base import DeviceBuffer
from ds_nvme.errors import InvalidBufferError
from ds_nvme.gds.driver import Driver


@dataclass
class Pin:
    """Registered memory.

    Args:
        base: address of its first byte.
        nbytes: how many.
        owner: what keeps it from being freed and lent to others while it is registered.
        ours: made by the handle, not only pinned.
        users: transfers that use it now.
    """

    base: int
    nbytes: int
    owner: Any
    ours: bool
    users: int = 0


class Pins:
    """Registered memory of one handle. Safe from any thread.

    Args:
        driver: registers it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._pins: dict[int, Pin] = {}  # by base

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        with self._lock:
            return sum(pin.nbytes for pin in self._pins.values())

    def add(self, buffer: DeviceBuffer, owner: Any, *, ours: bool) -> bool:
        """Register a buffer's memory; False where it is registered already, or is empty.

        Raises:
            GdsError: it can't be.
        """
        with self._lock:
            if not buffer.nbytes or self._around(buffer.address, buffer.nbytes) is not None:
                return False
            with buffer.device.using():
                self._driver.register_memory(buffer.address, buffer.nbytes)
            self._pins[buffer.address] = Pin(buffer.address, buffer.nbytes, owner, ours)
            return True

    def remove(self, buffer: DeviceBuffer, *, ours: bool) -> bool:
        """Deregister a buffer's memory; False where it wasn't registered by `add` with the same `ours`.

        Raises:
            InvalidBufferError: a transfer uses it.
        """
        with self._lock:
            pin = self._pins.get(buffer.address)
            if pin is None or pin.ours is not ours:
                return False
            if pin.users:
                raise InvalidBufferError(
                    f"a tensor is unpinned or freed when its transfers have ended: {pin.users} use it now; wait for "
                    "them first"
                )
            del self._pins[buffer.address]
            with buffer.device.using():
                self._driver.deregister_memory(pin.base)
            return True

    def use(self, address: int, nbytes: int) -> Pin | None:
        """The registered memory around a range, used until `leave`; None where there is none."""
        with self._lock:
            pin = self._around(address, nbytes)
            if pin is not None:
                pin.users += 1
            return pin

    def leave(self, pin: Pin) -> None:
        """A transfer has ended."""
        with self._lock:
            pin.users -= 1

    def close(self) -> None:
        """Deregister all that is left. Nothing may be in flight."""
        with self._lock:
            for pin in self._pins.values():
                self._driver.deregister_memory(pin.base)
            self._pins.clear()

    def _around(self, address: int, nbytes: int) -> Pin | None:
        for pin in self._pins.values():
            if pin.base <= address and address + nbytes <= pin.base + pin.nbytes:
                return pin
        return None
