"""The workers of one handle."""

from __future__ import annotations

from collections.abc import Sequence

from ds_nvme.share import divide
from ds_nvme.task import Task
from ds_nvme.worker import Worker


class Crew:
    """Workers that share every task. Safe from any thread.

    Args:
        workers: running; the crew ends them.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self._turn = 0

    def put(self, task: Task) -> None:
        """Carry out a task, soon. It ends in one of the workers' threads."""
        shares = divide(task, len(self.workers))
        task.begin(len(shares))
        self._turn += 1  # a lost count under a race is harmless: it only says who gets the first share
        for index, share in enumerate(shares):
            self.workers[(self._turn + index) % len(self.workers)].put(share)

    def close(self) -> None:
        """Wait for everything that was put, then end the workers."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.join()
