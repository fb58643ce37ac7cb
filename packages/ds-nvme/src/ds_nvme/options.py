"""The options of a handle as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Candidate:
    """Options of a handle. See `AioHandle`."""

    engine: str
    block_size: int
    queue_depth: int
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 1

    def section(self) -> dict[str, Any]:
        """The `aio` section of a configuration with these options."""
        return {
            "aio": {
                "block_size": self.block_size,
                "queue_depth": self.queue_depth,
                "thread_count": self.intra_op_parallelism,
                "single_submit": self.single_submit,
                "overlap_events": self.overlap_events,
            }
        }

    def python(self) -> str:
        """A line of Python that makes a handle with these options."""
        options = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items())
        return f"handle = ds_nvme.aio_handle({options})"
