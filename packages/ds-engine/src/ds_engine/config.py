"""Config: everything an engine is told, parsed once and checked as a whole.

Each package owns the model of its own section; here is one field a section, and the rules that cross
sections. Keys and defaults follow DeepSpeed's configuration reference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_comm import CommsLoggerConfig
from ds_engine.batch import BatchSizes
from ds_engine.config_errors import explain
from ds_engine.errors import ConfigError
from ds_engine.numbers import Real, Whole
from ds_engine.precision import AutocastConfig, Bf16Config, Fp16Config, Precision
from ds_zero import ZeroConfig

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}

# Documented sections and keys that later versions bring. Switched off they may stand in a configuration.
NOT_YET = {
    "activation_checkpointing", "aio", "amp", "autotuning", "checkpoint", "comet", "compile",
    "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "data_sampling",
    "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "hybrid_engine", "monitor_config",
    "data_routing", "datastates_ckpt", "nebula", "pipeline", "progressive_layer_drop", "quantize_training",
    "random_ltd", "sequence_parallel_size", "sparse_attention", "tensor_parallel", "tensorboard", "wandb", "zenflow",
}  # fmt: skip


class OptimizerConfig(BaseModel):
    """Which optimizer, with which arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    type: str
    """Name of a class of torch.optim, or a documented name as `FusedAdam`."""
    params: dict[str, Any] = {}
    """Arguments of its constructor. Default: none."""
    legacy_fusion: bool = False
    """Accepted and without effect. Default: false."""


class SchedulerConfig(BaseModel):
    """Which learning-rate schedule, with which arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    type: str
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler."""
    params: dict[str, Any] = {}
    """Arguments of its constructor. Default: none."""


class DataTypesConfig(BaseModel):
    """Dtypes that no other section sets."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Dtype in which micro-batches' gradients are added up. Default: the model's."""


class Config(BaseModel):
    """The whole configuration. Make one with `Config.load`, which explains what is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    train_batch_size: Whole | None = Field(None, gt=0)
    """Samples a step takes in all: micro-batch x accumulation x ranks. Default: computed."""
    train_micro_batch_size_per_gpu: Whole | None = Field(None, gt=0)
    """Samples a rank takes in one forward pass. Default: computed."""
    gradient_accumulation_steps: Whole | None = Field(None, gt=0)
    """Micro-batches a step. Default: computed, or 1."""
    managed_gradient_accumulation: bool = True
    """The engine counts micro-batches; false is not available in this version. Default: true."""
    optimizer: OptimizerConfig | None = None
    """Default: none; pass one to initialize()."""
    scheduler: SchedulerConfig | None = None
    """Default: none."""
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """Default: stage 0."""
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    """Default: off."""
    bf16: Bf16Config = Field(default_factory=Bf16Config)
    """Default: off."""
    torch_autocast: AutocastConfig = Field(default_factory=AutocastConfig)
    """Default: off."""
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Default: as the model."""
    gradient_clipping: Real = Field(0.0, ge=0.0)
    """Largest 2-norm of the gradient; 0 does not clip. Default: 0 (the reference says 1.0, but the original
    clips only where the key is set, and switching it on would change runs)."""
    communication_data_type: Literal["fp32", "fp16", "bf16", "bfp16"] | None = None
    """Dtype of gradients on the wire. Default: the model's."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """Gradients are averaged over ranks, or summed. Default: mean."""
    prescale_gradients: bool = False
    """Divide by the number of ranks before the sum. Default: false."""
    gradient_predivide_factor: Real = Field(1.0, gt=0.0)
    """Divide by this before the sum and by the rest after it; `prescale_gradients` overrides it. Default: 1."""
    sparse_gradients: bool = False
    """Accepted: sparse gradients are always taken, and reduced dense. Default: false."""
    steps_per_print: Whole = Field(10, ge=0)
    """Steps between progress lines; 0, null or infinity prints none. Default: 10."""
    wall_clock_breakdown: bool = False
    """Time forward, backward and step, synchronising the device. Default: false."""
    dump_state: bool = False
    """Log the configuration at initialisation. Default: false."""
    dataloader_drop_last: bool = False
    """Leave an incomplete last batch out. Default: false."""
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    """Default: off."""
    comm_timeout_s: Real | None = Field(None, gt=0.0)
    """Limit of a collective, in seconds. Default: the environment's, else 1800."""
    zero_allow_untested_optimizer: bool = False
    """Accepted and without effect: what an optimizer may be cut by is found out. Default: false."""
    zero_force_ds_cpu_optimizer: bool = False
    """Accepted and without effect in this version. Default: false."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Config:
        """Reads and checks a configuration.

        Args:
            source: a dict, or the path of a JSON file.

        Raises:
            ConfigError: no such file, broken JSON, an unknown key (the nearest known one is named), a value
                out of range, or sections that exclude each other.
        """
        if not isinstance(source, str | Path | Mapping):
            raise ConfigError(
                f"a configuration is a dict or the path of a JSON file: got {type(source).__name__}; pass one of them"
            )
        given = dict(source) if isinstance(source, Mapping) else _read(Path(source))
        _refuse_not_yet(given)
        given = {key: value for key, value in given.items() if key not in NOT_YET}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None

    @model_validator(mode="before")
    @classmethod
    def _spellings(cls, given: Any) -> Any:
        """`bfloat16` is an older name of `bf16`; `fp32_allreduce` of a communication dtype; null is the default."""
        if not isinstance(given, Mapping):
            return given
        given = dict(given)
        if given.get("steps_per_print", 0) in (None, math.inf):  # Accelerate writes infinity
            given["steps_per_print"] = 0
        given = {key: value for key, value in given.items() if value is not None}
        if "bfloat16" in given:
            _rename(given, "bfloat16", "bf16", given["bfloat16"])
        if given.pop("fp32_allreduce", False):
            _rename(given, "fp32_allreduce", "communication_data_type", "fp32")
        return given

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("one low precision at a time: fp16 and bf16 are both enabled; switch one of them off")
        if self.torch_autocast.enabled and (self.fp16.enabled or self.bf16.enabled):
            raise ValueError(
                "torch_autocast keeps parameters in fp32: it is enabled together with "
                f"{'fp16' if self.fp16.enabled else 'bf16'}; switch one of them off"
            )
        if not self.managed_gradient_accumulation:
            raise ValueError(
                "the engine counts micro-batches: managed_gradient_accumulation=false is not available in this "
                "version; leave it out, and call set_gradient_accumulation_boundary() to say where a step ends"
            )
        if self.comms_logger.enabled:
            raise ValueError("comms_logger is not available in this version: enabled=true; set it to false")
        return self

    @property
    def precision(self) -> Precision:
        """Dtypes of parameters and masters."""
        return Precision.of(self.fp16, self.bf16)

    @property
    def loss_scaling(self) -> Fp16Config:
        """The `fp16` section, enabled wherever float16 gradients are computed: also by autocast."""
        autocast = self.torch_autocast
        computes_fp16 = autocast.enabled and DTYPES[autocast.dtype] is torch.float16
        return self.fp16.model_copy(update={"enabled": True}) if computes_fp16 else self.fp16

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Dtype in which micro-batches are added up; None for the model's."""
        name = self.data_types.grad_accum_dtype
        return DTYPES[name] if name else None

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """Dtype of gradients on the wire; None for the model's."""
        return DTYPES[self.communication_data_type] if self.communication_data_type else None

    def batch_sizes(self, dp: int) -> BatchSizes:
        """The three batch sizes for `dp` data-parallel ranks.

        Raises:
            ConfigError: they can't be, or nothing is given.
        """
        return BatchSizes.solve(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, dp
        )


def _rename(given: dict[str, Any], old: str, new: str, value: Any) -> None:
    """Moves an older key to its newer name; both at once must not disagree."""
    given.pop(old, None)
    if given.setdefault(new, value) != value:
        raise ValueError(f"{old!r} is an older way to say {new!r}: both are given and differ; remove {old!r}")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before the text
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"a configuration is JSON in UTF-8: {path} has {error.object[error.start : error.start + 1]!r} at byte "
            f"{error.start}; save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"a configuration is a dict or a readable JSON file: {str(path)!r}: {error.strerror}; check the path"
        ) from None
    try:
        given = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1]
        raise ConfigError(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}: {line.strip()!r}; "
            "mend that line (JSON has no comments and no comma after the last item)"
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(f"a configuration is a JSON object: {path} holds a {type(given).__name__}; write {{...}}")
    return given


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f"a key stands once: {key!r} stands twice in one object; remove one of them")
        seen[key] = value
    return seen


def _refuse_not_yet(given: Mapping[str, Any]) -> None:
    for key in sorted(NOT_YET & set(given)):
        if _is_on(given[key]) and (key, given[key]) != ("sequence_parallel_size", 1):
            raise ConfigError(
                f"{key!r} is documented but not available in this version, and asks for something: "
                f"{json.dumps(given[key], default=str)}; remove it, or switch off what is in it"
            )


def _is_on(value: Any) -> bool:
    """It asks for something: a switch that is on, a number or a text; of a section, its `enabled` or any of it."""
    if isinstance(value, Mapping):
        return _is_on(value["enabled"]) if "enabled" in value else any(map(_is_on, value.values()))
    return bool(value)
