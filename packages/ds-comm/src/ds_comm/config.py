"""The `comms_logger` section of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CommsLoggerConfig(BaseModel):
    """What is recorded of each collective.

    Source: DeepSpeed's configuration reference, "Communication Logging".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    enabled: bool = False
    """Record collectives. Every recorded call synchronises, so that its time is true. Default: false."""

    verbose: bool = False
    """Log a line after every recorded call. Default: false."""

    prof_all: bool = True
    """Record every operation; false: only those in `prof_ops`. Default: true."""

    debug: bool = False
    """Add the caller's function name to each record. Default: false."""

    prof_ops: list[str] = []
    """Names of the operations to record where `prof_all` is false, as `all_reduce`. Default: none."""
