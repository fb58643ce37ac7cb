"""The handle that moves blocks with an engine of the kernel: `aio_handle`."""

from __future__ import annotations

from ds_nvme.blocks import carry_out
from ds_nvme.crew import Crew
from ds_nvme.description import Description
from ds_nvme.engines.base import Engine
from ds_nvme.engines.choose import candidates, names, refusal
from ds_nvme.errors import EngineError
from ds_nvme.face import Handle
from ds_nvme.files import OpenFile, Path
from ds_nvme.lane import Lanes
from ds_nvme.operation import Operation
from ds_nvme.plan import TransferPlan, plan_transfer
from ds_nvme.slots import ALIGN, slot_bytes
from ds_nvme.view import View
from ds_nvme.worker import Worker


class AioHandle(Handle):
    """Moves tensors between memory and files, asynchronously. Use it as a context manager, or `close()` it.

    The documented names: `sync_*` wait; `async_*` return at once and `wait()` waits for all of them. Python's:
    `start_read` and `start_write` return an `Operation`, a future of its own that asyncio can await; `wait()` leaves
    those alone. Buffers are anything contiguous: numpy arrays, bytearrays, memoryviews, torch tensors on the CPU
    or on a device. What lies on a device passes through a few page-locked buffers, so that the drive and the copies
    keep each other busy: at most 64 MiB for each device and direction, made when first needed.

    A write replaces bytes of the file in place, creates the file where there is none, and never shortens it.
    Safe to use from several threads.

    Args:
        block_size: bytes of one request to the drive.
        queue_depth: most requests in flight, for each of the `intra_op_parallelism` threads.
        single_submit: hand requests to the kernel one by one.
        overlap_events: refill the queue as requests end; otherwise only when all in flight have ended.
        intra_op_parallelism: threads that share each operation.
        engine: "auto", or one of `ds_nvme.engine_names()`.

    Raises:
        ValueError: an option is out of range.
        EngineError: the named engine can't run here.

    Source: DeepNVMe tutorial, "Advanced Handle Creation".
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        workers, self._engine, self._why = self._hire(engine, intra_op_parallelism)
        self._crew = Crew(workers)
        self._slot_nbytes = slot_bytes(block_size, intra_op_parallelism)
        self._lanes = Lanes(self._crew, self._slot_nbytes)
        self._done_here = 0
        self._close_with(self._lanes.close, self._crew.close)

    def describe(self, filename: Path | None = None) -> Description:
        """Which way transfers go and why; with a file, also how that file can be accessed. Prints as text."""
        return Description(
            engine=self._engine.name,
            path=self._engine.path(),
            why=self._why,
            refused={name: reason for name in names() if (reason := refusal(name)) is not None},
            block_size=self._block_size,
            queue_depth=self._queue_depth,
            single_submit=self._single_submit,
            overlap_events=self._overlap_events,
            intra_op_parallelism=self._intra_op_parallelism,
            blocks_at_once=self._done_here,
            straight_blocks=sum(worker.counts.straight for worker in self._crew.workers),
            bounced_blocks=sum(worker.counts.bounced for worker in self._crew.workers),
            mended_blocks=sum(worker.counts.mended for worker in self._crew.workers),
            file=self._access(filename),
            notes=tuple(self._lanes.describe()),
        )

    # --- how

    def _hire(self, name: str, count: int) -> tuple[list[Worker], type[Engine], str]:
        """Workers with the engine of that name, or with "auto" the first that runs; and why it is this one."""
        refused: list[str] = []
        for engine in candidates(name):
            workers: list[Worker] = []
            try:
                for index in range(count):
                    workers.append(
                        Worker(
                            engine,
                            self._queue_depth,
                            single_submit=self._single_submit,
                            overlap=self._overlap_events,
                            name=f"ds-nvme-{engine.name}-{index}",
                        )
                    )
            except EngineError as error:
                Crew(workers).close()
                refused.append(f"not {engine.name}: {error}")
            else:
                return workers, engine, "; ".join(["asked for" if name != "auto" else "the first that runs", *refused])
        raise EngineError(f"engine {name!r} runs here: {'; '.join(refused)}; use engine='auto'")

    def _plan(self, view: View, file: OpenFile, file_offset: int, write: bool) -> TransferPlan:
        on_device = view.device is not None
        return plan_transfer(
            write=write,
            # Bytes from a device lie in a slot as is best for the file.
            address=file_offset % ALIGN if on_device else view.address,
            nbytes=view.nbytes,
            file_offset=file_offset,
            file_size=file.size,
            alignment=file.alignment(),
            block_size=min(self._block_size, self._slot_nbytes) if on_device else self._block_size,
        )

    def _put(self, operation: Operation) -> None:
        if operation.view.device is not None:
            self._lanes.put(operation)
        else:
            self._crew.put(operation)

    def _put_at_once(self, operation: Operation) -> bool:
        if operation.plan.blocks > 1 or operation.view.device is not None:
            return False
        self._done_here += 1
        carry_out(operation)
        return True
