"""Precision: dtypes of parameters and masters, and fp16's loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ds_engine.errors import EngineError
from ds_engine.numbers import Real, Whole


class Fp16Config(BaseModel):
    """The `fp16` section."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    enabled: bool = False
    """Train in float16 with fp32 masters and a loss scale. Default: false."""
    auto_cast: bool = False
    """Cast floating-point inputs of the model to float16. Default: false."""
    loss_scale: Real = Field(0.0, ge=0.0)
    """A fixed loss scale; 0 adapts it. Default: 0."""
    initial_scale_power: Whole = Field(16, ge=0)
    """The adaptive scale starts at 2 to this power. Default: 16."""
    loss_scale_window: Whole = Field(1000, gt=0)
    """Steps without overflow, in a row, after which the next such step doubles the scale. Default: 1000."""
    hysteresis: Whole = Field(2, gt=0)
    """Overflows that are forgiven before the scale halves, counting the one that halves it. Default: 2."""
    consecutive_hysteresis: bool = False
    """A step without overflow forgives again; false only when the scale doubles. Default: false."""
    min_loss_scale: Real = Field(1, gt=0)
    """The adaptive scale never falls below. Default: 1."""
    fp16_master_weights_and_grads: bool = False
    """No fp32 masters. Default: false."""


class Bf16Config(BaseModel):
    """The `bf16` section."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    enabled: bool = False
    """Train in bfloat16 with fp32 masters. Default: false."""
    auto_cast: bool = False
    """Cast floating-point inputs of the model to bfloat16. Default: false."""
    bf16_master_weights_and_grads: bool = False
    """No fp32 masters. Default: false."""
    bf16_optimizer_states: bool = False
    """Optimizer states in bfloat16; only together with `bf16_master_weights_and_grads`. Default: false."""

    @model_validator(mode="after")
    def _states(self) -> Bf16Config:
        if self.bf16_optimizer_states != self.bf16_master_weights_and_grads and self.enabled:
            raise ValueError(
                "optimizer states have the dtype of the values they update: bf16_optimizer_states="
                f"{str(self.bf16_optimizer_states).lower()} with bf16_master_weights_and_grads="
                f"{str(self.bf16_master_weights_and_grads).lower()}; set both or none"
            )
        return self


class AutocastConfig(BaseModel):
    """The `torch_autocast` section: fp32 parameters, operations cast by torch.autocast.

    In float16 losses are scaled, by the numbers of the `fp16` section (which itself stays off).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    enabled: bool = False
    """Default: false."""
    dtype: Literal["bfloat16", "bf16", "float16", "fp16"] = "bfloat16"
    """Dtype of the cast operations. Default: bfloat16."""


@dataclass(frozen=True)
class Precision:
    """Dtypes: of the parameters (None leaves them), of what the optimizer updates, of cast inputs."""

    parameters: torch.dtype | None = None
    masters: torch.dtype | None = None
    inputs: torch.dtype | None = None

    @classmethod
    def of(cls, fp16: Fp16Config, bf16: Bf16Config) -> Precision:
        """What the two sections say together."""
        if fp16.enabled:
            masters = None if fp16.fp16_master_weights_and_grads else torch.float32
            return cls(torch.float16, masters, torch.float16 if fp16.auto_cast else None)
        if bf16.enabled:
            masters = None if bf16.bf16_master_weights_and_grads else torch.float32
            return cls(torch.bfloat16, masters, torch.bfloat16 if bf16.auto_cast else None)
        return cls()


class LossScaler:
    """The number that fp16 losses are multiplied by, so that small gradients survive.

    Static where the section gives `loss_scale`; else it halves on overflow and doubles in the first step
    without one after `loss_scale_window` such steps, and after every further window. The reference doesn't say
    which step of a window doubles: DeepSpeed counts so, and a run that moves here keeps its scales.

    Source: DeepSpeed's configuration reference, "FP16 training options".
    """

    def __init__(self, config: Fp16Config):
        self._config = config
        self.active = config.enabled
        """Losses are scaled, and a step whose gradients are not finite is left out."""
        self.dynamic = config.enabled and config.loss_scale == 0.0
        self.scale = 1.0
        if config.enabled:
            self.scale = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        self._forgiven = config.hysteresis
        self._calm = 0  # steps without overflow since the last one

    def update(self, overflow: bool) -> None:
        """After every step: did a gradient overflow?

        Raises:
            EngineError: it did, and the scale is as small as it may be.
        """
        if not self.dynamic:
            return
        config = self._config
        if overflow:
            self._calm = 0
            if self._forgiven > 1:
                self._forgiven -= 1
                return
            if self.scale <= config.min_loss_scale:
                raise EngineError(
                    f"gradients are not finite at the smallest loss scale ({self.scale:g}): they are inf or nan by "
                    "themselves; look for a division by zero or a log of zero in the loss, lower the learning "
                    "rate, or use bf16"
                )
            self.scale = max(self.scale / 2, config.min_loss_scale)
            return
        if config.consecutive_hysteresis:
            self._forgiven = config.hysteresis
        if self._calm and self._calm % config.loss_scale_window == 0:
            self._forgiven = config.hysteresis
            self.scale *= 2
        self._calm += 1

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"scale": self.scale, "forgiven": self._forgiven, "calm": self._calm}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint."""
        self.scale, self._forgiven, self._calm = state["scale"], int(state["forgiven"]), int(state["calm"])
