"""Getters: what one may ask an engine, by the documented names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_comm import Communicator, get_local_rank
from ds_engine.batch import BatchSizes
from ds_engine.config import Config
from ds_engine.precision import LossScaler
from ds_zero import ShardedOptimizer


class Getters:
    """Answers from an engine's parts; changes nothing.

    Source: DeepSpeed API reference 2.1, "Training API".
    """

    config: Config
    comm: Communicator
    optimizer: ShardedOptimizer | None
    loss_scaler: LossScaler
    _batch: BatchSizes
    _grad_norm: torch.Tensor | None
    _applied: bool

    def train_batch_size(self) -> int:
        """Samples a step takes in all."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a rank takes in one forward pass."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch, micro-batch, accumulation."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._param_groups() if "lr" in group]

    def get_mom(self) -> list[Any]:
        """The momentum of every parameter group: `betas`, or `momentum`."""
        return [group.get("betas", group.get("momentum")) for group in self._param_groups()]

    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_global_grad_norm(self) -> float | None:
        """2-norm over all ranks of the last step's averaged gradient, before clipping; None before a step."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def was_step_applied(self) -> bool:
        """The last boundary updated the parameters (it is left out where fp16 gradients overflow)."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by: 1 unless in fp16."""
        return self.loss_scaler.scale

    @property
    def cur_scale(self) -> float:
        """The same, by its older name."""
        return self.loss_scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """The loss scale adapts."""
        return self.loss_scaler.dynamic

    def gradient_clipping(self) -> float:
        """Largest 2-norm of the gradient; 0 does not clip."""
        return self.config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Training is in float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Training is in bfloat16."""
        return self.config.bf16.enabled

    def zero_optimization(self) -> bool:
        """Any state is sharded."""
        return self.config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero_optimization.stage

    def steps_per_print(self) -> int:
        """Steps between progress lines; 0 prints none."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Forward, backward and step are timed."""
        return self.config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """The configured optimizer's name; None for a client's."""
        return self.config.optimizer.type if self.config.optimizer else None

    def scheduler_name(self) -> str | None:
        """The configured scheduler's name; None for a client's."""
        return self.config.scheduler.type if self.config.scheduler else None

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.comm.world

    @property
    def world_size(self) -> int:
        """All ranks."""
        return dist.get_world_size()

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """This rank on its machine."""
        return get_local_rank()
