"""Bounded host memory that bytes pass through between a file and a device."""

from __future__ import annotations

from ds_nvme.devices.base import Device
from ds_nvme.errors import BudgetError
from ds_nvme.memory import Memory

ALIGN = 64 << 10
"""Slots begin at multiples of this: as much as any O_DIRECT asks for."""
MOST_BLOCK = 16 << 20
"""Largest block of a transfer through slots, in bytes."""
_LEAST_SLOT = 4 << 20
_SLOTS = 4
"""One is copied from or to while the others are in the drive's hands; more gain nothing where the copy is faster."""


def slot_bytes(block_size: int, parallelism: int) -> int:
    """Size of a slot: a block for each worker, within 4 and 16 MiB."""
    wanted = min(max(block_size * parallelism, _LEAST_SLOT), MOST_BLOCK)
    return -(-wanted // ALIGN) * ALIGN


class Slot:
    """One stretch of memory, `nbytes` from byte `at` of `memory` on."""

    __slots__ = ("address", "at", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.memory = Memory(nbytes + ALIGN)
        self.at = -self.memory.address % ALIGN
        self.address = self.memory.address + self.at
        self.nbytes = nbytes


class Slots:
    """At most four slots, page-locked for one device, each made when first needed. For one thread.

    Args:
        device: whose copies use them.
        nbytes: size of each.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.made = 0
        self.unlocked: str | None = None
        """Why slots aren't page-locked, where they aren't."""
        self._device = device
        self._free: list[Slot] = []
        self._locked: list[Slot] = []

    def take(self) -> Slot | None:
        """A free slot, or None while all are in use.

        Raises:
            BudgetError: there is no memory even for one.
        """
        if self._free:
            return self._free.pop()
        if self.made == _SLOTS:
            return None
        try:
            slot = Slot(self.nbytes)
        except BudgetError:
            if not self.made:
                raise
            return None
        self.made += 1
        refused = self._device.lock_pages(slot.memory)
        if refused is None:
            self._locked.append(slot)
        else:
            self.unlocked = refused
        return slot

    def give(self, slot: Slot) -> None:
        """Take one back."""
        self._free.append(slot)

    def close(self) -> None:
        """Unlock and forget them. None may be in use."""
        for slot in self._locked:
            self._device.unlock_pages(slot.memory)
        self._locked.clear()
        self._free.clear()
