"""pread and pwrite on a few threads: works on every file and system."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import ClassVar

from ds_nvme.engines.base import Engine, Run
from ds_nvme.native import libc

_MOST_THREADS = 32
"""More gain nothing on any drive of today and cost a stack each."""


class ThreadsEngine(Engine):
    """Blocking calls on as many threads as there were blocks in flight, at most 32. See `Engine`."""

    name: ClassVar[str] = "threads"

    def __init__(self, depth: int) -> None:
        self._limit = min(depth, _MOST_THREADS)
        self._threads: list[threading.Thread] = []
        self._requests: SimpleQueue[tuple[Run, int, int] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._in_flight = 0

    def pack(self, run: Run, tag: int) -> tuple[Run, int]:
        return run, tag

    def submit(self, packed: tuple[Run, int], start: int, count: int) -> int:
        run, tag = packed
        self._in_flight += count
        while len(self._threads) < min(self._in_flight, self._limit):
            thread = threading.Thread(
                target=_serve, args=(self._requests, self._results), name="ds-nvme-pread", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        for index in range(start, start + count):
            self._requests.put((run, index, tag + index))
        return count

    def reap(self, minimum: int) -> tuple[list[int], list[int]]:
        ended = [self._results.get() for _ in range(minimum)]
        while True:
            try:
                ended.append(self._results.get_nowait())
            except Empty:
                break
        self._in_flight -= len(ended)
        return [tag for tag, _ in ended], [result for _, result in ended]

    def close(self) -> None:
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    @classmethod
    def path(cls) -> str:
        return "pread and pwrite on threads"


def _serve(requests: SimpleQueue[tuple[Run, int, int] | None], results: SimpleQueue[tuple[int, int]]) -> None:
    while (request := requests.get()) is not None:
        run, index, tag = request
        move = libc.pwrite if run.write else libc.pread
        position = index * run.block_nbytes
        results.put((tag, move(run.fd, run.address + position, run.length(index), run.file_offset + position)))
