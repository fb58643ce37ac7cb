"""Contenders of nvme.py in a process of their own: handles, pinned memory for the whole file, and orders on stdin.

Runs under whichever Python has the contender installed, so it imports nothing of this repository but ds_nvme.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Ours:
    """ds-nvme; a variant is an engine."""

    def __init__(self, nbytes: int) -> None:
        import ds_nvme
        from ds_nvme.engines.choose import refusal

        self._package = ds_nvme
        self.variants = [name for name in ds_nvme.engine_names() if refusal(name) is None]
        # Locked where the process may; either way direct I/O pins it.
        try:
            self.memory = ds_nvme.memory.Memory(nbytes, lock=True)
        except ds_nvme.BudgetError:
            self.memory = ds_nvme.memory.Memory(nbytes)
        self.buffer: Any = self.memory.buffer[:nbytes]
        piece = os.urandom(1 << 20)
        for start in range(0, nbytes, len(piece)):
            self.buffer[start : start + len(piece)] = piece[: nbytes - start]

    def handle(self, variant: str, block: int, depth: int) -> Any:
        """A handle of that engine."""
        return self._package.aio_handle(block, depth, False, True, 1, engine=variant)


class DeepSpeed:
    """DeepSpeed's aio_handle; a variant is a number of threads."""

    variants = ["1", "4"]

    def __init__(self, nbytes: int) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._module = AsyncIOBuilder().load()
        pinner = self.handle("1", 1 << 20, 1)
        self.buffer = pinner.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self._pinner = pinner  # it owns the memory
        self.buffer.random_(0, 256)

    def handle(self, variant: str, block: int, depth: int) -> Any:
        """A handle with so many threads."""
        return self._module.aio_handle(block, depth, False, True, int(variant))


def main() -> None:
    """Answers each order, a list of variant, block, depth, "read" or "write", and path, with two numbers: seconds
    and processor seconds."""
    kind, nbytes = sys.argv[1], int(sys.argv[2])
    contender = {"ours": Ours, "deepspeed": DeepSpeed}[kind](nbytes)
    handles: dict[tuple[str, int, int], Any] = {}
    print(json.dumps(contender.variants), flush=True)
    for line in sys.stdin:
        variant, block, depth, order, path = json.loads(line)
        key = (variant, block, depth)
        if key not in handles:
            handles[key] = contender.handle(*key)
        move = handles[key].sync_pwrite if order == "write" else handles[key].sync_pread
        processor, wall = time.process_time(), time.perf_counter()
        move(contender.buffer, path, 0)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps([wall, processor]), flush=True)
    if kind == "deepspeed":
        os._exit(0)  # its threads abort an ordinary exit


if __name__ == "__main__":
    main()
