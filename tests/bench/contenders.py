"""The contenders: how each builds its training step. Imported by the ranks, never by the coordinator.

A contender is named `family[-stage][:key=value,...]`, for instance `ddp`, `deepspeed-1`, `ours-2` or
`deepspeed-1:optimizer=own,bucket=5e7`. `load` imports its libraries, `build` makes its step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpt import GPT
from torch import Tensor

LR = 1e-4
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0

DEEPSPEED_SETTINGS = {"reduce_bucket_size": 5_000_000, "overlap_comm": False}
"""What made DeepSpeed fastest here, against its defaults: 7 to 11 percent less time, and less memory.
Bucket sizes of 5e8 (its default), 5e6, 2e6 and 1e6 were tried, and overlap_comm both ways."""

Mark = Callable[[str], None]
"""Called by a step at the end of each of its phases, with the phase's name."""
Step = Callable[[Tensor, Tensor, Mark], Tensor]
"""Takes tokens, targets and a mark; trains one step and returns the rank's loss."""


@dataclass(frozen=True)
class Contender:
    """A parsed contender name."""

    family: str
    stage: int = 0
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str) -> Contender:
        """Splits `family[-stage][:key=value,...]`."""
        head, _, tail = name.partition(":")
        family, _, stage = head.partition("-")
        if family not in FAMILIES:
            raise ValueError(f"contender {name!r}: family must be one of {sorted(FAMILIES)}")
        options = dict(pair.split("=", 1) for pair in tail.split(",") if pair)
        return cls(family, int(stage or 0), options)

    def load(self) -> None:
        """Imports everything the contender needs, so that memory counted later is not a library."""
        for module in FAMILIES[self.family][0]:
            importlib.import_module(module)

    def build(self, model: GPT, dtype: torch.dtype) -> Step:
        """The contender's training step over `model`, computing in `dtype`."""
        return FAMILIES[self.family][1](self, model, dtype)


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _torch_step(model: torch.nn.Module, clip: bool = True, optimize: bool = True) -> Step:
    """The usual loop of plain torch: also the loop of DDP and FSDP2."""
    optimizer = _adamw(model)
    parameters = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor, mark: Mark) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(tokens, targets)
        mark("forward")
        loss.backward()
        mark("backward")
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            mark("clip")
        if optimize:
            optimizer.step()
            mark("optimizer")
        return loss.detach()

    return step


def _floor(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """Forward and backward alone on every rank at once: what no contender can go below."""
    return _torch_step(model.to(dtype), clip=False, optimize=False)


def _local(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """A whole step on every rank at once that never communicates (each rank trains its own model)."""
    return _torch_step(model.to(dtype))


def _ddp(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """DDP; for bf16 the weights and optimizer states are bf16 too (no fp32 masters)."""
    from torch.nn.parallel import DistributedDataParallel

    bucket_mb = float(contender.options.get("bucket_mb", 25))
    view = contender.options.get("view", "1") == "1"
    wrapped = DistributedDataParallel(
        model.to(dtype), gradient_as_bucket_view=view, broadcast_buffers=False, bucket_cap_mb=bucket_mb
    )
    return _torch_step(wrapped)


def _fsdp2(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """fully_shard over each block and the root; for bf16 fp32 shards that compute in bf16.

    Weights stay gathered between forward and backward, as with ZeRO 1 and 2; `reshard=1` frees them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype)
    reshard = contender.options.get("reshard", "0") == "1"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _torch_step(model)


def _config(contender: Contender, dtype: torch.dtype) -> dict[str, Any]:
    """The JSON configuration that DeepSpeed and ours share."""
    zero: dict[str, Any] = {"stage": contender.stage}
    for key, value in contender.options.items():
        if key in ("reduce_bucket_size", "allgather_bucket_size") or key.startswith("stage3_"):
            zero[key] = int(float(value))
        elif key in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients"):
            zero[key] = value == "1"
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def _engine_step(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor, mark: Mark) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        mark("forward")
        engine.backward(loss)
        mark("backward")
        engine.step()
        mark("step")
        return loss.detach()

    return step


def _deepspeed(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """DeepSpeed, with torch's fused AdamW (optimizer=client) or the one it builds itself (optimizer=own)."""
    deepspeed = importlib.import_module("deepspeed")

    deepspeed.init_distributed("gloo", verbose=False)
    config = _config(contender, dtype) | {"steps_per_print": 1_000_000_000}
    config["zero_optimization"] = DEEPSPEED_SETTINGS | config["zero_optimization"]
    optimizer = None
    if contender.options.get("optimizer", "client") == "client":
        config["zero_allow_untested_optimizer"] = True
        optimizer = _adamw(model)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    return _engine_step(engine)


def _ours(contender: Contender, model: GPT, dtype: torch.dtype) -> Step:
    """Our engine, from the same JSON and its own optimizer."""
    ds_engine = importlib.import_module("ds_engine")

    config = _config(contender, dtype) | {
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    }
    engine, *_ = ds_engine.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(engine)


FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[Contender, GPT, torch.dtype], Step]]] = {
    "floor": ((), _floor),
    "local": ((), _local),
    "ddp": (("torch.nn.parallel",), _ddp),
    "fsdp2": (("torch.distributed.fsdp", "torch.distributed.tensor"), _fsdp2),
    "deepspeed": (("deepspeed",), _deepspeed),
    "ours": (("ds_engine",), _ours),
}
"""Modules to import and the builder, by family."""
