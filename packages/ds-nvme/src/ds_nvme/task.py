"""What a worker carries out: planned moves between one file and one stretch of memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from ds_nvme.files import OpenFile
from ds_nvme.plan import TransferPlan


class Task(ABC):
    """Carried out in shares, by several threads. Ends once, when the last share has.

    Args:
        plan: what is moved how.
        file: an open file.
        address: of the memory that the plan's buffer offsets count from.
    """

    def __init__(self, plan: TransferPlan, file: OpenFile, address: int) -> None:
        self.plan = plan
        """What is moved how."""
        self.path = file.path
        """The file."""
        self.file = file
        self.address = address
        self.failed = False
        """Some block has failed; those that aren't under way yet will not be."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._shares = 0

    def begin(self, shares: int) -> None:
        """It is about to be carried out in so many shares."""
        self._shares = shares

    def fail(self, error: BaseException) -> None:
        """Note a block's error. The first is kept."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.failed = True

    def leave(self) -> bool:
        """A share has ended; whether it was the last of those begun."""
        with self._lock:
            self._shares -= 1
            return self._shares == 0

    @abstractmethod
    def end(self) -> None:
        """Everything has arrived, or failed."""
