"""What memory a model's states need under ZeRO-2: a table to read before renting the machines.

The formulas and the table are those of DeepSpeed's documentation (chapter "Memory Requirements"). They count
fp16 parameters, gradients and Adam's states; activations and temporary memory come on top.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

GB = 2**30
"""Bytes in what the table calls GB."""


@dataclass(frozen=True)
class MemoryRow:
    """The memory needed under one set of options."""

    options: str
    """The options, as the configuration names them."""
    cpu_bytes: int
    """Memory of one node's host, in bytes."""
    gpu_bytes: int
    """Memory of one GPU, in bytes."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory needed for parameters, optimizer states and gradients; `str()` of it is the documented table."""

    total_params: int
    """Parameters of the model, each once."""
    num_gpus_per_node: int
    """GPUs in a node."""
    num_nodes: int
    """Nodes."""
    additional_buffer_factor: float
    """Factor on the host's memory, to be on the safe side."""
    rows: tuple[MemoryRow, ...]
    """One row for each set of options."""
    largest_layer_params: int | None = None
    """Parameters of the largest module by itself; of ZeRO-3 only."""

    def __str__(self) -> str:
        return "\n".join(
            [
                "Estimated memory needed for params, optim states and gradients for a:",
                f"HW: Setup with {_counted(self.num_nodes, 'node')}, "
                f"{_counted(self.num_gpus_per_node, 'GPU')} per node.",
                f"SW: Model with {self.total_params // 10**6}M total params{self._largest()}.",
                "  per CPU  |  per GPU |   Options",
                *(f"{row.cpu_bytes / GB:8.2f}GB | {row.gpu_bytes / GB:6.2f}GB | {row.options}" for row in self.rows),
            ]
        )

    def _largest(self) -> str:
        if self.largest_layer_params is None:
            return ""
        return f", {self.largest_layer_params // 10**6}M largest layer params"


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Memory that ZeRO-2 needs for a model's states, as (bytes of a node's host, bytes of a GPU).

    With P parameters, g GPUs in a node and G in all:

                          host of a node                 GPU
        offload to CPU    P * max(4 * g, 16) * factor    2 * P
        no offload        P * 4 * g * factor             4 * P + 16 * P / G

    The host's memory without offload is what each process needs at the start to build the model.

    These are the documented formulas. DeepSpeed 0.19 has two others: 2 * P + 18 * P / G for a GPU without
    offload, which is less where there is more than one GPU, and G in place of g for the host under offload,
    which is more where there is more than one node.

    Args:
        total_params: parameters of the model; `2851e6` is fine.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        cpu_offload: optimizer states and gradients are on the host. Default True.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.

    Raises:
        ValueError: a number out of its range.
    """
    check_at_least("total_params", total_params, 0)
    check_at_least("num_gpus_per_node", num_gpus_per_node, 1)
    check_at_least("num_nodes", num_nodes, 1)
    check_at_least("additional_buffer_factor", additional_buffer_factor, 0)
    if cpu_offload:
        cpu_bytes = total_params * max(4 * num_gpus_per_node, 16) * additional_buffer_factor
        gpu_bytes = 2 * total_params
    else:
        cpu_bytes = total_params * 4 * num_gpus_per_node * additional_buffer_factor
        gpu_bytes = 4 * total_params + 16 * total_params / (num_gpus_per_node * num_nodes)
    return int(cpu_bytes), int(gpu_bytes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    quiet: bool = False,
) -> MemoryEstimate:
    """Write and return a table of what ZeRO-2 needs with and without offload, for a number of parameters.

    Args:
        total_params: parameters of the model; `2851e6` is fine.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.
        quiet: don't write the table to standard output. Default False.

    Raises:
        ValueError: a number out of its range.
    """
    rows = []
    for device in ("cpu", "none"):
        cpu_bytes, gpu_bytes = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, device == "cpu", additional_buffer_factor
        )
        rows.append(MemoryRow(f"offload_optimizer={device}", cpu_bytes, gpu_bytes))
    estimate = MemoryEstimate(int(total_params), num_gpus_per_node, num_nodes, additional_buffer_factor, tuple(rows))
    if not quiet:
        sys.stdout.write(f"{estimate}\n")
    return estimate


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    quiet: bool = False,
) -> MemoryEstimate:
    """Write and return a table of what ZeRO-2 needs with and without offload, for a model.

    Parameters that share their memory are counted once. The model may be on the meta device.

    Args:
        model: the model.
        num_gpus_per_node: GPUs in a node. Default 1.
        num_nodes: nodes. Default 1.
        additional_buffer_factor: factor on the host's memory, to be on the safe side. Default 1.5.
        quiet: don't write the table to standard output. Default False.

    Raises:
        ValueError: a number out of its range.
    """
    return estimate_zero2_model_states_mem_needs_all_cold(
        count_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor, quiet=quiet
    )


def count_params(model: nn.Module) -> int:
    """Parameters of a model, those that share memory once."""
    # Two parameters of one address are one (tied through `.data`); `parameters()` has merged the others.
    numels: dict[tuple[str, int], int] = {}
    for param in model.parameters():
        key = _address(param)
        numels[key] = max(numels.get(key, 0), param.numel())
    return sum(numels.values())


def _address(param: torch.Tensor) -> tuple[str, int]:
    """Where a parameter lies; one without memory (on the meta device, or empty) lies by itself."""
    address = 0 if param.device.type == "meta" else param.data_ptr()
    return (str(param.device), address) if address else ("", id(param))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def check_at_least(name: str, value: float, least: int) -> None:
    """Raises a ValueError where a number is less."""
    if not value >= least:
        raise ValueError(f"{name} is at least {least}, got {value!r}: give the number your setup has")
