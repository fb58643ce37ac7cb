"""The `zero_optimization` section of a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Features, which must not be left out in silence. Stage 3's sizes are only its tuning: they may stand.
_ONLY_STAGE_3 = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
)


class OffloadParamConfig(BaseModel):
    """Where parameters rest while they are not in use; stage 3 only."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    device: Literal["none", "cpu", "nvme"] = "none"
    """Default: none (they stay on the device)."""
    nvme_path: Path | None = None
    """Folder on the drive. Default: none."""
    buffer_count: int = Field(5, ge=0)
    """Buffers in the pool for NVMe. Default: 5."""
    buffer_size: int = Field(100_000_000, ge=0)
    """Elements of each buffer. Default: 1e8."""
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    """Elements kept in CPU memory when offloading to NVMe. Default: 1e9."""
    pin_memory: bool = False
    """Page-locked CPU memory. Default: false."""


class OffloadOptimizerConfig(BaseModel):
    """Where optimizer states rest and are updated."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    device: Literal["none", "cpu", "nvme"] = "none"
    """Default: none (on the device)."""
    nvme_path: Path | None = None
    """Folder on the drive. Default: none."""
    buffer_count: int = Field(4, ge=0)
    """Buffers in the pool for NVMe. Default: 4."""
    pin_memory: bool = False
    """Page-locked CPU memory. Default: false."""
    pipeline_read: bool = False
    """Read the next tile while this one is computed. Default: false."""
    pipeline_write: bool = False
    """Write the last tile while this one is computed. Default: false."""
    fast_init: bool = False
    """Quick first write of the states to NVMe. Default: false."""
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    """Share of the states that is offloaded. Default: 1."""


class ZeroConfig(BaseModel):
    """How model states are spread over the data-parallel ranks.

    Sizes are in elements. Source: DeepSpeed's configuration reference, "ZeRO Optimizations", and API
    reference 5.1.1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)

    stage: Literal[0, 1, 2, 3] = 0
    """0: every state on every rank; 1: optimizer states sharded; 2: gradients too. Default: 0."""
    contiguous_gradients: bool = True
    """Gather gradients in one buffer a shard group; false reduces each parameter on its own. Default: true."""
    reduce_scatter: bool = True
    """Average gradients by reduce-scatter; false by all-reduce, of which each rank keeps its part. Default: true."""
    reduce_bucket_size: int = Field(500_000_000, gt=0)
    """Most elements reduced at a time. Shard groups may be smaller. Default: 5e8."""
    allgather_partitions: bool = True
    """Collect updated parameters by all-gather; false by one broadcast a rank. Default: true."""
    allgather_bucket_size: int = Field(500_000_000, gt=0)
    """Most elements gathered at a time. Default: 5e8."""
    overlap_comm: bool | None = None
    """Reduce while backward still computes. Default: false (true at stage 3)."""
    round_robin_gradients: bool = False
    """Deal whole parameters out to ranks in turn rather than cutting groups evenly. Default: false."""
    ignore_unused_parameters: bool = True
    """A parameter without a gradient counts as zero; false makes it an error that names it. Default: true."""
    use_multi_rank_bucket_allreduce: bool = True
    """Accepted and without effect: a shard group always spans all ranks. Default: true."""
    load_from_fp32_weights: bool = True
    """On load, masters come from the checkpoint's fp32 weights. Default: true."""
    elastic_checkpoint: bool = False
    """Deprecated by the original; every checkpoint is elastic. Default: false."""
    legacy_stage1: bool = False
    """Deprecated by the original, without effect. Default: false."""
    grad_hooks: bool = True
    """Accepted and without effect: gradients are always taken as they arrive. Default: true."""
    log_trace_cache_warnings: bool = False
    """Stage 3. Default: false."""
    sub_group_size: int = Field(1_000_000_000, ge=0)
    """Elements updated at a time when states are offloaded. Default: 1e9."""
    offload_param: OffloadParamConfig | None = None
    """Stage 3. Default: none."""
    offload_optimizer: OffloadOptimizerConfig | None = None
    """Default: none."""
    zenflow: dict[str, Any] | None = None
    """Updates the most important gradients first; part of offloading. Default: none."""
    prefetch_bucket_size: int = Field(50_000_000, ge=0, alias="stage3_prefetch_bucket_size")
    """Stage 3. Default: 5e7."""
    param_persistence_threshold: int = Field(100_000, ge=0, alias="stage3_param_persistence_threshold")
    """Stage 3. Default: 1e5."""
    model_persistence_threshold: int = Field(sys.maxsize, ge=0, alias="stage3_model_persistence_threshold")
    """Stage 3. Default: no limit."""
    max_live_parameters: int = Field(1_000_000_000, ge=0, alias="stage3_max_live_parameters")
    """Stage 3. Default: 1e9."""
    max_reuse_distance: int = Field(1_000_000_000, ge=0, alias="stage3_max_reuse_distance")
    """Stage 3. Default: 1e9."""
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    """Stage 3. Default: false."""
    module_granularity_threshold: int = Field(0, ge=0, alias="stage3_module_granularity_threshold")
    """Stage 3. Default: 0."""
    zero_hpz_partition_size: int = Field(1, ge=1)
    """Stage 3. Default: 1."""
    zero_quantized_weights: bool = False
    """Stage 3. Default: false."""
    zero_quantized_nontrainable_weights: bool = False
    """Stage 3. Default: false."""
    zero_quantized_gradients: bool = False
    """Stage 3. Default: false."""
    mics_shard_size: int = -1
    """Stage 3. Default: -1 (off)."""
    mics_hierarchical_params_gather: bool = False
    """Stage 3. Default: false."""
    memory_efficient_linear: bool = True
    """Stage 3. Default: true."""
    pipeline_loading_checkpoint: bool = False
    """Default: false."""
    override_module_apply: bool = True
    """Stage 3. Default: true."""

    @field_validator(
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        mode="before",
    )
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """Sizes are written as 5e8, which JSON reads as a float."""
        if isinstance(value, bool):
            raise ValueError(f"a size is a number of elements: got {str(value).lower()}; write a number, as 5e8")
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="before")
    @classmethod
    def _deprecated(cls, section: Any) -> Any:
        """`true` for the whole section, and keys that newer ones have replaced."""
        if isinstance(section, bool):
            return {"stage": 1 if section else 0}
        if not isinstance(section, dict):
            return section
        section = dict(section)
        for name in ("offload_param", "offload_optimizer"):
            if section.get(name) is False:  # as the reference writes the default
                section[name] = None
        pin = bool(section.pop("cpu_offload_use_pin_memory", None))
        if section.pop("cpu_offload", None):
            section.setdefault("offload_optimizer", {"device": "cpu", "pin_memory": pin})
        if section.pop("cpu_offload_param", None):
            section.setdefault("offload_param", {"device": "cpu", "pin_memory": pin})
        if (old := section.pop("stage3_gather_fp16_weights_on_model_save", None)) is not None:
            section.setdefault("stage3_gather_16bit_weights_on_model_save", old)
        return section

    @model_validator(mode="after")
    def _available(self) -> ZeroConfig:
        for name in _ONLY_STAGE_3:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(
                    f"{name} is a part of stage 3 that is not available in this version: "
                    f"{name}={json.dumps(value)}; set it to {json.dumps(default)} or leave it out"
                )
        if self.zenflow is not None:
            raise ValueError("zenflow is not available in this version; leave it out, or set it to null")
        for name in ("offload_param", "offload_optimizer"):
            section = getattr(self, name)
            if section is not None and section.device != "none":
                raise ValueError(
                    f"offloading is not available in this version: {name}.device={section.device!r}; "
                    f"set it to 'none' or leave {name} out"
                )
        return self
