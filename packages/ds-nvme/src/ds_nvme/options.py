"""The options of a handle as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_nvme.config import AioConfig

GDS = "gds"
"""The engine of a candidate that is no engine of `aio_handle` but `gds_handle`."""


@dataclass(frozen=True, order=True)
class Candidate:
    """Options of a handle. See `AioHandle`; the engine "gds" stands for a `gds_handle`."""

    engine: str
    block_size: int
    queue_depth: int
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 1

    def config(self) -> AioConfig:
        """These options as a configuration's section, which names no engine."""
        from ds_nvme.config import AioConfig  # pydantic is slow to load

        return AioConfig(
            block_size=self.block_size,
            queue_depth=self.queue_depth,
            intra_op_parallelism=self.intra_op_parallelism,
            single_submit=self.single_submit,
            overlap_events=self.overlap_events,
        )

    def section(self) -> dict[str, Any]:
        """The `aio` section of a configuration with these options."""
        return {"aio": self.config().model_dump(by_alias=True)}

    def python(self) -> str:
        """A line of Python that makes a handle with these options."""
        kind = "gds_handle" if self.engine == GDS else "aio_handle"
        options = {name: value for name, value in asdict(self).items() if (name, value) != ("engine", GDS)}
        return f"handle = ds_nvme.{kind}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
