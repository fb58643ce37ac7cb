"""One contender of nvme.py in a process of its own: a handle, a gigabyte of pinned memory, and orders on stdin.

Runs under whichever Python has the contender installed, so it imports nothing of this repository but ds_nvme.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def make(options: dict[str, Any]) -> tuple[Any, Any]:
    """The contender's handle and buffer."""
    arguments = (options["block"], options["depth"], False, True, options["threads"])
    if options["kind"] == "ours":
        import ds_nvme

        handle = ds_nvme.aio_handle(*arguments, engine=options["engine"])
        buffer = handle.new_cpu_locked_tensor(options["size"], bytearray(1))
        half = len(buffer) // 2
        buffer[:half] = bytes(range(256)) * (half // 256)
        buffer[half:] = buffer[:half]
    else:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load().aio_handle(*arguments)
        buffer = handle.new_cpu_locked_tensor(options["size"], torch.empty(0, dtype=torch.uint8))
        buffer.copy_(torch.arange(256, dtype=torch.uint8).repeat(-(-options["size"] // 256))[: options["size"]])
    return handle, buffer


def main() -> None:
    options = json.loads(sys.argv[1])
    handle, buffer = make(options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = line.strip()
        if order == "end":
            break
        move = handle.sync_pwrite if order == "write" else handle.sync_pread
        processor, wall = time.process_time(), time.perf_counter()
        move(buffer, options["path"])
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps([wall, processor]), flush=True)
    if options["kind"] == "deepspeed":
        import os

        os._exit(0)  # its threads abort an ordinary exit


if __name__ == "__main__":
    main()
