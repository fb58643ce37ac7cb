"""Seconds from the first import to the first bytes moved, in the fresh process that this is: `KIND FILE`.

Like nvme_worker.py it runs under whichever Python has the contender installed.
"""

import time

start = time.perf_counter()

import sys  # noqa: E402


def main() -> None:
    """Reads the file's first 4096 bytes and prints the time."""
    kind, path = sys.argv[1:]
    if kind == "ours":
        import ds_nvme

        with ds_nvme.aio_handle() as handle:
            handle.sync_pread(bytearray(4096), path)
            print(time.perf_counter() - start, flush=True)
        return
    import os

    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 128, False, True, 1)
    handle.sync_pread(handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8)), path, 0)
    print(time.perf_counter() - start, flush=True)
    os._exit(0)  # its threads abort an ordinary exit


if __name__ == "__main__":
    main()
