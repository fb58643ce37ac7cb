"""The `aio` section of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from ds_nvme.handle import AioHandle


class AioConfig(BaseModel):
    """Asynchronous I/O of tensors.

    Source: DeepSpeed's configuration reference, "Asynchronous I/O"; its defaults, which differ from the handle's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)

    block_size: int = Field(1 << 20, ge=1)
    """Bytes of one request to the drive. Default: 1 MiB."""
    queue_depth: int = Field(8, ge=1)
    """Most requests in flight, each thread. Default: 8."""
    intra_op_parallelism: int = Field(
        1,
        ge=1,
        validation_alias=AliasChoices("thread_count", "intra_op_parallelism"),
        serialization_alias="thread_count",
    )
    """Threads that share each operation; `thread_count` is the documented name. Default: 1."""
    single_submit: bool = False
    """Hand requests to the kernel one by one. Default: false."""
    overlap_events: bool = True
    """Refill the queue as requests end. Default: true."""

    def handle(self, *, engine: str = "auto") -> AioHandle:
        """A handle with these options.

        Args:
            engine: see `AioHandle`. Default: the best that runs here.
        """
        from ds_nvme.handle import AioHandle

        return AioHandle(
            self.block_size,
            self.queue_depth,
            self.single_submit,
            self.overlap_events,
            self.intra_op_parallelism,
            engine=engine,
        )
